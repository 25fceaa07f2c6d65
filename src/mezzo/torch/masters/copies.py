"""What makes an optimizer with masters whole again after `copy.deepcopy`, `pickle` and `torch.load`.

PyTorch copies an optimizer's ``param_groups`` and state, and leaves its hooks behind. The masters come along by themselves;
the hooks, with which masters are saved in checkpoints, are put back by the two methods that an object may bring for its own
copying. They are attributes of the one optimizer; its class stays as it is.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .settings import Owner

__all__ = ["attach", "at_attaching", "detach", "owner_of"]

_OWNER, _HANDLES = "_mezzo_owner", "_mezzo_handles"
"""Attributes of an optimizer. What it holds is freed with it, also if a step that failed has left the two in a cycle."""

at_attaching: list[Callable[[torch.optim.Optimizer], list[Any]]] = []
"""What to do with an optimizer when it is attached; each gives handles that have ``remove``."""


def owner_of(optimizer: torch.optim.Optimizer) -> Owner | None:
    """Give what the masters of an optimizer share; None if it was not prepared."""
    return vars(optimizer).get(_OWNER)


def attach(optimizer: torch.optim.Optimizer, owner: Owner) -> None:
    """Give an optimizer that holds masters its hooks; nothing is done if it has them.

    Args:
        optimizer: The optimizer.
        owner: What its masters share.
    """
    if _OWNER in vars(optimizer):
        return
    handles = [handle for call in at_attaching for handle in call(optimizer)]
    itself = weakref.ref(optimizer)
    vars(optimizer).update(
        {
            _OWNER: owner,
            _HANDLES: handles,
            # Where `copy` and `pickle` look before they look at the class.
            "__deepcopy__": lambda memo: _deepcopied(_there(itself), memo),
            "__reduce_ex__": lambda _protocol: _reduced(_there(itself)),
        }
    )


def detach(optimizer: torch.optim.Optimizer) -> None:
    """Take away what `attach` gave."""
    for handle in vars(optimizer).get(_HANDLES, ()):
        handle.remove()
    for name in (_OWNER, _HANDLES, "__deepcopy__", "__reduce_ex__"):
        vars(optimizer).pop(name, None)


def _there(reference: weakref.ref[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = reference()
    assert optimizer is not None, "its own attributes call this"
    return optimizer


def _deepcopied(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = optimizer.__class__.__new__(optimizer.__class__)
    memo[id(optimizer)] = made
    state = copy.deepcopy((optimizer.__getstate__(), owner_of(optimizer)), memo)
    return _restored(made, *state)


def _reduced(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    cls = optimizer.__class__
    return _remade, (cls, optimizer.__getstate__(), owner_of(optimizer))


def _remade(cls: type[torch.optim.Optimizer], state: dict[str, Any], owner: Any) -> torch.optim.Optimizer:
    return _restored(cls.__new__(cls), state, owner)


def _restored(optimizer: torch.optim.Optimizer, state: dict[str, Any], owner: Any) -> torch.optim.Optimizer:
    optimizer.__setstate__(state)
    attach(optimizer, owner)
    return optimizer
