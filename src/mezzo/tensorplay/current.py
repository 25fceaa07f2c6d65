"""What the wrappers look at in every call: the plan and the kept casts of the thread that calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mezzo.tensorplay.weight_casts import WeightCasts

__all__ = ["CURRENT", "Action", "Current", "Plan"]

Action = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""How a call of an op is made: from the op's own function and the arguments that came."""

Plan = Mapping[str, Action]
"""What is done with a call of which op; an op that is not in it runs as it is called."""


class Current(threading.local):
    """One thread's.

    Attributes:
        plan: What the wrappers act by; None where nothing is cast.
        casts: The kept casts of weights; None where none are to be kept.
        kept: The same, where none are to be kept too; None outside of regions of mezzo's.
    """

    plan: Plan | None = None
    casts: WeightCasts | None = None
    kept: WeightCasts | None = None


CURRENT = Current()
"""The state of the thread that asks."""
