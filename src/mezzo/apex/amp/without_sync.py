"""Backward passes under DDP's ``no_sync``: after them each rank has gradients of its own.

A rank that judged these would have a scale and skips of its own too. Whether a backward pass takes sums over ranks is
settled in the forward pass, so a hook on the model takes it down there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from mezzo.torch.eager import not_compiled_alone

if TYPE_CHECKING:
    from mezzo.apex.amp.stash import AmpStash

__all__ = ["is_without_sync", "watch_sync"]

_DDP: Any = nn.parallel.DistributedDataParallel

_synced: weakref.WeakKeyDictionary[Any, bool | None] = weakref.WeakKeyDictionary()
"""DDP modules: whether the backward pass of their last forward pass sums; None if that was compiled, so nobody saw."""


def watch_sync(model: nn.Module) -> None:
    """Have a model's forward passes inside DDP looked at. A hook that copies and pickles; done twice, it is there once.

    Args:
        model: The model, which may be wrapped in DDP later. ``torch.compile`` of the wrapper hides it.
    """
    if _before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before_forward)


def is_without_sync(stashes: Sequence[AmpStash]) -> bool:
    """Say whether gradients of optimizers are, since the last forward pass, those of this rank alone.

    Args:
        stashes: Of the optimizers.
    """
    if not _synced:
        return False
    alone = [ddp for ddp, sync in _synced.items() if not (ddp.require_backward_grad_sync if sync is None else sync)]
    if not alone:
        return False
    mine = {id(one) for stash in stashes for one in stash.holders()}
    return any(id(one) in mine for ddp in alone for one in ddp.parameters())


@not_compiled_alone
def _before_forward(_module: nn.Module, _args: object) -> None:
    if is_dynamo_compiling():
        _note_compiled()
    elif torch.is_grad_enabled():
        ddp = _DDP._get_active_ddp_module()
        if ddp is not None:
            _synced[ddp] = ddp.require_backward_grad_sync


def _note_compiled() -> None:
    ddp = _DDP._get_active_ddp_module()
    if ddp is not None:
        _synced[ddp] = None


# As torch.compiler.assume_constant_result does, which imports Dynamo: called while the code is traced.
_note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
