"""Watched models: their ``forward`` has its thread enter O1, and is what a cast of a weight lives for."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from mezzo.apex.amp.cast_regions import ensure_here, is_settled
from mezzo.apex.amp.cast_state import HERE
from mezzo.torch.cache import keeping
from mezzo.torch.eager import not_compiled_alone, runs_eagerly

__all__ = ["forget_weight_casts", "watch_model"]


def watch_model(model: nn.Module) -> None:
    """Have each call of a model enter O1 in the thread that makes it, if O1 is on.

    Two hooks do it. They are functions of this module: a model with them can be copied and pickled. While O1 is off they do
    nothing. Watched again, a model has them once.

    Args:
        model: The model. It is not rewritten.

    While its ``forward`` runs a weight is cast once; the casts go when it ends, so none is there when weights change.

    Of a compiled model: a thread that has called nothing else is in O1 during the call, and PyTorch takes it out again at
    the end; `ensure_here` outside of compiled code, or ``scale_loss``, has it stay.
    """
    if _before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before_forward, prepend=True)
    if _after_forward not in model._forward_hooks.values():
        model.register_forward_hook(_after_forward, always_call=True)


def forget_weight_casts() -> None:
    """Drop the casts of weights that this thread and PyTorch's own cache hold."""
    torch.clear_autocast_cache()


@not_compiled_alone
def _before_forward(_module: nn.Module, _args: tuple[Any, ...]) -> None:
    if is_dynamo_compiling():
        # In most threads this is settled before they call compiled code. Else the graph is broken here, once.
        if not _may_stay():
            ensure_here()
        return
    _begin_forward(sys._getframe(1))


@not_compiled_alone
def _after_forward(_module: nn.Module, _args: object, _output: object) -> None:
    if not is_dynamo_compiling():
        _end_forward(sys._getframe(1))


def _may_stay() -> bool:
    return is_settled() or bool(HERE.switched) or torch._C._current_graph_task_id() != -1


# As torch.compiler.assume_constant_result does, which imports Dynamo: asked while the code is traced.
_may_stay._dynamo_marked_constant = True  # type: ignore[attr-defined]


@runs_eagerly
def _begin_forward(frame: FrameType) -> None:
    ensure_here()
    here = HERE
    if here.started is None or not here.started.keeps_casts:
        return
    found = torch.is_autocast_cache_enabled()
    # The frame of the call: what calls this hook is a function in it.
    here.forwards.append((frame.f_back or frame, found))
    if len(here.forwards) == 1 and not keeping.depth:
        torch.clear_autocast_cache()
    if not found:
        torch.set_autocast_cache_enabled(True)


@runs_eagerly
def _end_forward(frame: FrameType) -> None:
    forwards = HERE.forwards
    # After an exception it is the frame of the call itself that calls hooks.
    place = next((place for place, (one, _) in enumerate(forwards) if one is frame.f_back or one is frame), None)
    if place is None:
        return
    torch.set_autocast_cache_enabled(forwards[place][1])
    del forwards[place:]
    if not forwards and not keeping.depth:
        torch.clear_autocast_cache()
