"""The forward pass of a prepared model sees its masters as they are now.

Whoever steps through an optimizer's ``step`` need not care. Others write to ``param_groups`` by hand: SAM moves weights
there and evaluates the model, schedule-free optimizers swap theirs for evaluation.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from .params import Made, Master, master_of
from .steps import write_back

__all__ = ["see_masters"]

_known: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[weakref.ref[Master]]]] = weakref.WeakKeyDictionary()


def see_masters(module: nn.Module, _args: object) -> None:
    """Refresh the weights whose masters were written to since: a forward pre-hook. Compiled code leaves it out."""
    if not torch.compiler.is_compiling():
        _refresh(module)


def _refresh(module: nn.Module) -> None:
    made, masters = _known.get(module, (-1, []))
    if made != Made.count:
        # In the order of the module, so that random numbers are drawn in one order.
        found = [master for one in module.parameters() if (master := master_of(one)) is not None]
        masters = [weakref.ref(one) for one in found if one.owner.settings.keeps_masters]
        _known[module] = Made.count, masters
    moved = [one for reference in masters if (one := reference()) is not None and one._version != one.written]
    if moved:
        write_back(moved, None)
