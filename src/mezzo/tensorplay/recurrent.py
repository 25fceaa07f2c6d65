"""Recurrent layers: a check of theirs, written in Python, that would refuse lower-precision inputs in a region.

`tensorplay.nn.RNN`, ``LSTM`` and ``GRU`` raise if their input is of another dtype than their weights, before any op could
cast either. In a region that is how a layer after a linear one is called.
"""

from __future__ import annotations

import functools
from typing import Any

from tensorplay.nn.modules import rnn

from mezzo.tensorplay.choke_points import replace_while_open
from mezzo.tensorplay.current import CURRENT
from mezzo.tensorplay.places import Place

__all__ = ["watch_recurrent_layers"]

CHECK = "_check_attributes"


def watch_recurrent_layers() -> None:
    """Have the check left out in threads that are in an enabled region; called once, when the adapter is imported."""
    replace_while_open(Place(rnn, CHECK, CHECK), _unless_cast)


def _unless_cast(_label: str, check: Any) -> Any:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        # What does not fit for another reason is refused by the ops.
        return check(*args, **kwargs) if CURRENT.plan is None else None

    return functools.update_wrapper(replacement, check)
