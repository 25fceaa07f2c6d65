"""``baddbmm(input, a, b, beta=0)``: TensorPlay's low kernels add what uninitialised memory holds; here they get zeros.

That is how attention scores are often computed, with an empty tensor for ``input``, which beta=0 says to ignore.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorplay

from mezzo.tensorplay.current import Action

__all__ = ["READING_GARBAGE", "with_zeros"]

READING_GARBAGE = frozenset(("baddbmm", "baddbmm_"))
"""The ops that do so."""


def with_zeros(action: Action) -> Action:
    """Make a call with beta=0 one with zeros in the place of what is to be ignored.

    Args:
        action: What is done with the calls of an op in `READING_GARBAGE`.

    Returns:
        An action.
    """

    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("beta", 1) == 0 and len(args) == 3 and kwargs.get("out") is None:
            ignored, left, right = args
            kwargs = {**kwargs, "beta": 1}
            if function.__name__.endswith("_"):
                everywhere = tensorplay.ones(ignored.shape, dtype=tensorplay.bool, device=ignored.device)
                args = (ignored.masked_fill_(everywhere, 0.0), left, right)
            else:
                shape = (left.shape[0], left.shape[1], right.shape[2])
                args = (tensorplay.zeros(shape, dtype=ignored.dtype, device=ignored.device), left, right)
        return action(function, args, kwargs)

    return act
