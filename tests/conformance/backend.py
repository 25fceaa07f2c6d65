"""What a framework must offer so that the semantics every adapter shares can be stated once and run on it.

Dtypes are names ("bfloat16"), arrays are the framework's own and opaque here, numbers come back as plain Python lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mezzo import LossScaling, ScaleState, Verdict
    from mezzo.builtin import PolicyLike

__all__ = ["MATRIX", "OTHER_LOW", "Backend", "Region", "product_dtype", "softmax_dtype"]

OTHER_LOW = {"bfloat16": "float16", "float16": "bfloat16"}
MATRIX = [[0.5, -1.25, 2.0], [1.5, 0.75, -0.25], [0.1, 0.2, 0.3]]

Array = Any
Numbers = Sequence[Any]


class Region(AbstractContextManager[Any], Protocol):
    """An autocast region: entered with ``with``, also again while it is open, or used as a decorator."""

    def __call__(self, function: Callable[..., Any], /) -> Callable[..., Any]:
        """Decorate a function so that each call runs in the region."""
        ...


class Backend(Protocol):
    """One framework's adapter, seen from the tests.

    Attributes:
        name: The test id.
        low_dtypes: The lower-precision dtypes in which its regions can compute.
        policies: The built-in policies that its framework has.
    """

    name: str
    low_dtypes: tuple[str, ...]
    policies: tuple[str, ...]

    def region(self, dtype: str | None = None, *, enabled: bool = True, policy: PolicyLike | None = None) -> Region:
        """Make a region; without a dtype it takes the one in force, without a policy likewise."""
        ...

    def array(self, values: Numbers, dtype: str) -> Array:
        """Make an array of (nested) numbers."""
        ...

    def numbers(self, array: Array) -> list[float]:
        """Give the elements of an array, flat, as Python floats."""
        ...

    def dtype_name(self, array: Array) -> str:
        """Name the dtype of an array."""
        ...

    def matmul(self, left: Array, right: Array) -> Array:
        """Multiply two matrices; every policy but ``fp32`` runs it in lower precision."""
        ...

    def softmax(self, array: Array) -> Array:
        """Take the softmax over the last dimension; ``unified`` runs it in float32."""
        ...

    def sum(self, array: Array) -> Array:
        """Add up all elements; ``unified`` runs it in float32."""
        ...

    def relu(self, array: Array) -> Array:
        """Cut off negative elements; no policy lists it."""
        ...

    def cross(self, left: Array, right: Array) -> Array:
        """Take the cross product over the last dimension; ``unified`` promotes its inputs to the widest dtype."""
        ...

    def gradient(self, function: Callable[[Array], Array], weight: Array) -> Array:
        """Differentiate a scalar function of a float32 array, forward and backward in the region it is called in."""
        ...

    def is_enabled(self) -> bool:
        """Say whether this thread is in an enabled region."""
        ...

    def scales(
        self, numbers: LossScaling, verdicts: Sequence[Verdict], *, start: ScaleState | None = None
    ) -> list[tuple[float, int]]:
        """Drive the framework's scaler through gradients that earn each verdict; give (scale, growth tracker) after each.

        Args:
            numbers: What the scaler is made with.
            verdicts: One for each iteration.
            start: What a checkpoint says that is loaded first; None starts afresh.
        """
        ...


def product_dtype(backend: Backend) -> str:
    """Name the dtype in which a product of float32 matrices comes out here and now."""
    x = backend.array(MATRIX, "float32")
    return backend.dtype_name(backend.matmul(x, x))


def softmax_dtype(backend: Backend, dtype: str) -> str:
    """Name the dtype in which the softmax of a matrix of a dtype comes out here and now."""
    return backend.dtype_name(backend.softmax(backend.array(MATRIX, dtype)))
