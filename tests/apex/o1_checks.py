"""How the calls of a list are run and held to their float32 values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mezzo.torch import autocast

from .o1_calls import Make, call, forms

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
low_dtypes = pytest.mark.parametrize("low", [BF16, F16], ids=str)
ON_COMPARISON = {f"{sides}{name}{sides}" for name in ("eq", "ge", "gt", "le", "lt", "ne") for sides in ("", "__")}
NO_DTYPE = {*ON_COMPARISON, "equal"}
"""Names that give truth values."""

TOLERANCE = {
    # Two units in the last place, which are 2 ** -7 and 2 ** -10: a product is rounded once, and for addmm and its like the
    # sum once more. Kernels add the up to 81 terms in float32.
    BF16: {"rtol": 2**-6, "atol": 2**-6},
    F16: {"rtol": 2**-9, "atol": 2**-9},
    # The same kernel in float32, or one that adds in another order.
    F32: {"rtol": 1e-6, "atol": 1e-6},
}


ON_THE_RIGHT = ("__radd__", "__rmul__", "__rsub__", "__rdiv__", "__rtruediv__")
"""Behind these is a number on the left, where they are called as operators."""


def region(low: torch.dtype) -> autocast:
    """Make a region on the CPU with the policy."""
    return autocast("cpu", dtype=low, policy="apex-o1")


def cases(*kinds: str, without: tuple[str, ...] = ()) -> Any:
    """Parametrize over every form of every name on some lists."""
    found = [form for form in forms(*kinds) if form[1] not in without]
    return pytest.mark.parametrize(("home", "name"), found, ids=[".".join(form) for form in found])


def run(home: str, name: str, first: torch.dtype, rest: torch.dtype, **how: bool) -> Any:
    """Call a name with its first tensor in one dtype and all others in another."""
    return call(home, name, Make(first, seed=0), Make(rest, seed=1, **how))


def check(result: Any, dtype: torch.dtype, expected: Any) -> None:
    """Hold a result to its dtype and to the value in float32."""
    if not isinstance(expected, Tensor):
        assert result is expected
        return
    assert result.dtype is dtype
    torch.testing.assert_close(result.float(), expected.float(), **TOLERANCE.get(dtype, TOLERANCE[F32]))
