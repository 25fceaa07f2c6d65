"""Running statistics: what a normalization writes into its arguments must not be lost in the cast of one.

``batch_norm`` and its kin update ``running_mean`` and ``running_var`` in place, while training, though they are inputs that
a rule or a repair may cast. So what was written into a cast goes back to the tensor that it was made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorplay

from mezzo.tensorplay.current import Action

__all__ = ["UPDATING", "keeping_statistics"]

UPDATING = frozenset(
    [
        "batch_norm",
        "instance_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
        "cudnn_batch_norm",
        "miopen_batch_norm",
    ]
)
"""The ops that update statistics; in all of them these are the fourth and fifth argument."""

_PLACES = (3, 4)
_NAMES = ("running_mean", "running_var")


def keeping_statistics(action: Action) -> Action:
    """Have updates of running statistics reach the tensors of the caller.

    Args:
        action: What is done with the calls of an op in `UPDATING`.

    Returns:
        An action.
    """

    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call(*used: Any, **named: Any) -> Any:
            result = function(*used, **named)
            pairs = [(args[place], used[place]) for place in _PLACES if place < len(args)]
            pairs += [(kwargs[name], named[name]) for name in _NAMES if name in kwargs]
            with tensorplay.no_grad():
                for original, cast in pairs:
                    if cast is not original:
                        original.copy_(cast)
            return result

        return action(call, args, kwargs)

    return act
