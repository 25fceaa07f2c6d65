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
            given: dict[int | str, Any] = {place: args[place] for place in _PLACES if place < len(args)}
            given |= {name: kwargs[name] for name in _NAMES if name in kwargs}
            reach: dict[Any, Any] = {**dict(enumerate(used)), **named}
            taken = {key: _not_narrowed(original, reach[key]) for key, original in given.items()}
            reach |= taken
            result = function(*(reach[place] for place in range(len(used))), **{name: reach[name] for name in named})
            with tensorplay.no_grad():
                for key, original in given.items():
                    if taken[key] is not original:
                        original.copy_(taken[key])
            return result

        return action(call, args, kwargs)

    return act


def _not_narrowed(original: Any, cast: Any) -> Any:
    """Give the caller's own tensor where it was cast to fewer bits: an average in these would stand still."""
    if cast is original or original is None:
        return original
    return original if original.element_size() > cast.element_size() else cast
