"""``baddbmm(input, a, b, beta=0)``: TensorPlay's low kernels add what uninitialised memory holds; here they get zeros.

That is how attention scores are often computed, with an empty tensor for ``input``, which beta=0 says to ignore.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorplay

from mezzo.tensorplay.current import Action
from mezzo.tensorplay.dtypes import KIND, TENSOR

__all__ = ["READING_GARBAGE", "with_zeros"]

_OPERANDS = {"baddbmm": ("batch1", "batch2"), "addbmm": ("batch1", "batch2"), "addr": ("vec1", "vec2")}
"""The names of what is multiplied."""

READING_GARBAGE = frozenset(name + suffix for name in _OPERANDS for suffix in ("", "_"))
"""The ops that do so, and those in place."""


def with_zeros(op: str, action: Action) -> Action:
    """Make a call with beta=0 one with zeros in the place of what is to be ignored.

    Args:
        op: One of `READING_GARBAGE`.
        action: What is done with its calls.

    Returns:
        An action.
    """

    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "self" in kwargs and not args:  # as the public function of `addr` calls it
            args, kwargs = (kwargs["self"],), {name: value for name, value in kwargs.items() if name != "self"}
        if kwargs.get("beta", 1) == 0 and args and KIND[type(args[0])] == TENSOR:
            zeros = _zeros(op, args, kwargs)
            if zeros is not None:
                args, kwargs = (zeros, *args[1:]), {**kwargs, "beta": 1}
        return action(function, args, kwargs)

    return act


def _zeros(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """Make the zeros, in place after a look at the shapes; None for a call that the op will refuse."""
    ignored, plain = args[0], op.removesuffix("_")
    operands = [*args[1:], *(kwargs[name] for name in _OPERANDS[plain] if name in kwargs)]
    rank = 1 if plain == "addr" else 3
    if [KIND[type(value)] for value in operands] != [TENSOR] * 2 or any(value.dim() != rank for value in operands):
        return None
    left, right = (tuple(value.shape) for value in operands)
    if rank == 3 and (left[0] != right[0] or left[2] != right[1]):
        return None
    shape: tuple[int, ...] = (left[0], right[0]) if rank == 1 else (left[1], right[2])
    if plain == "baddbmm":
        shape = (left[0], *shape)
    if op == plain:
        return tensorplay.zeros(shape, dtype=ignored.dtype, device=ignored.device)
    if tuple(ignored.shape) != shape:
        return None
    everywhere = tensorplay.ones(shape, dtype=tensorplay.bool, device=ignored.device)
    return ignored.masked_fill_(everywhere, 0.0)
