"""What a framework cannot meet, and why: these cases are strict expected failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["UNMET", "Unmet"]


@dataclass(frozen=True)
class Unmet:
    """Cases that a framework cannot meet.

    Attributes:
        backend: The name of the backend.
        test: The name of the test.
        cause: Why it cannot be met.
        only: The parameters of the cases; those not named may be anything.
        raises: How the test fails.
    """

    backend: str
    test: str
    cause: str
    only: Mapping[str, Any] = field(default_factory=dict)
    raises: type[BaseException] = AssertionError

    def covers(self, test: str, parameters: Mapping[str, Any]) -> bool:
        """Say whether a case of a test is meant."""
        if test != self.test or parameters["backend"].name != self.backend:
            return False
        return all(parameters[name] == value for name, value in self.only.items())


STATELESS = "a transformation is no state of the thread: nobody can be asked whether code runs in it"
NOT_AMBIENT = "a transformation takes what it is given or the default, not what is given to a transformation around it"
LOW_ALREADY = (
    "a product whose operands were all cast to lower precision by the program itself is left as it was written"
)
CAST_BACK = (
    "jnp.sum adds up in float32 and casts its result back to the input's dtype, as an explicit cast, which is obeyed"
)

UNMET = (
    Unmet("jax", "test_one_can_ask_whether_a_region_is_open", STATELESS, raises=NotImplementedError),
    Unmet("jax", "test_an_exception_closes_a_region_for_those_who_ask", STATELESS, raises=NotImplementedError),
    Unmet("jax", "test_a_function_that_calls_itself_closes_its_regions", STATELESS, raises=NotImplementedError),
    Unmet("jax", "test_a_thread_is_asked_about_its_own_regions", STATELESS, raises=NotImplementedError),
    Unmet("jax", "test_a_region_without_a_dtype_takes_the_one_around_it", NOT_AMBIENT, {"low": "float16"}),
    Unmet("jax", "test_a_region_without_a_policy_keeps_full_precision_around_it", NOT_AMBIENT),
    Unmet(
        "jax",
        "test_the_unified_policy_gives_each_op_its_dtype",
        LOW_ALREADY,
        {"op": "matmul", "inputs": ("other", "other")},
    ),
    Unmet("jax", "test_the_unified_policy_gives_each_op_its_dtype", CAST_BACK, {"op": "sum", "inputs": ("low",)}),
)
