"""Backward passes under DDP's ``no_sync``: after them each rank has gradients of its own.

A rank that judged these would have a scale and skips of its own too. Whether a backward pass takes sums over ranks is
settled in DDP's forward pass, so a hook on it takes that down. One on the model sees passes that go by no DDP.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import register_module_module_registration_hook

from mezzo.apex.amp.checks import inner_model
from mezzo.torch.eager import not_compiled_alone, runs_eagerly

if TYPE_CHECKING:
    from mezzo.apex.amp.stash import AmpStash

__all__ = ["is_without_sync", "watch_sync"]

_DDP: Any = nn.parallel.DistributedDataParallel

_synced: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""DDP modules: whether the backward pass of their last forward pass sums."""

_lock = threading.Lock()
_watching: list[object] = []


def watch_sync(model: nn.Module) -> None:
    """Have every DDP that is made from now on looked at before its forward passes, and the model before those without one.

    Args:
        model: The model. The hook on it copies and pickles; done twice, it is there once.
    """
    with _lock:
        if not _watching:
            _watching.append(register_module_module_registration_hook(_new_child))
    if _before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before_forward)


def is_without_sync(stashes: Sequence[AmpStash]) -> bool:
    """Say whether gradients of optimizers are, since the last forward pass, those of this rank alone.

    Args:
        stashes: Of the optimizers.
    """
    alone = [ddp for ddp, sync in _synced.items() if not sync] if _synced else []
    if not alone:
        return False
    mine = {id(one) for stash in stashes for one in stash.holders()}
    return any(id(one) in mine for ddp in alone for one in ddp.parameters())


def _new_child(module: nn.Module, name: str, _child: nn.Module | None) -> None:
    if name == "module" and isinstance(module, _DDP):
        module.register_forward_pre_hook(_before_ddp)


@runs_eagerly
def _before_ddp(ddp: Any, _args: object) -> None:
    if torch.is_grad_enabled():
        _forget(inner_model(ddp.module))
        _synced[ddp] = ddp.require_backward_grad_sync


@not_compiled_alone
def _before_forward(module: nn.Module, _args: object) -> None:
    if is_dynamo_compiling():
        return
    if _synced and torch.is_grad_enabled() and _DDP._get_active_ddp_module() is None:
        _forget(module)


def _forget(model: nn.Module) -> None:
    """A model is called in another way: what its DDPs have seen last counts no more."""
    for ddp in list(_synced):
        if inner_model(ddp.module) is model:
            _synced[ddp] = True
