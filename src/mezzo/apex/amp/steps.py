"""How a step is skipped without a patch of ``optimizer.step``: in hooks around it the gradients are out of sight.

An optimizer passes over parameters without gradients: that is how it treats frozen ones. So for a step that is not to be
made, all gradients are taken away in a hook before it, and put back after it. The method stays the optimizer's own, so
learning rate schedulers, copies and pickles are as without amp.

A step that raises has no hooks after it. The frame of the step is kept, and whoever comes next sees that it has ended.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from mezzo.apex.amp import casts
from mezzo.apex.amp._amp_state import maybe_print
from mezzo.apex.amp.stash import AmpStash, Begun, sharing, stash_of
from mezzo.apex.amp.unscaling import multiply, unscale
from mezzo.torch.eager import runs_eagerly, runs_itself_eagerly
from mezzo.torch.masters.hooks import watch_steps
from mezzo.torch.scaling.closures import Kept

__all__ = ["recover", "watch_amp_steps"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_lock = threading.Lock()
_watching: list[object] = []

_STILL_SCALED = (
    "optimizer.step() came after a scale_loss block with delay_unscale=True, or under DDP's no_sync, and no other block in "
    "between. Gradients were unscaled now. Leave delay_unscale and no_sync out in the last block before a step, so that "
    "gradients can be clipped, and are summed over ranks."
)


def watch_amp_steps() -> None:
    """Have the steps of all optimizers looked at; once per process. Those without an ``_amp_stash`` are left alone."""
    with _lock:
        if _watching:
            return
        # Masters see the gradients as they are after our hook, and are done with them before the other.
        watch_steps()
        before = torch_optimizer.register_optimizer_step_pre_hook(_before)
        _watching.append(before)
        hooks: Any = torch_optimizer._global_optimizer_pre_hooks
        hooks.move_to_end(before.id, last=False)
        _watching.append(torch_optimizer.register_optimizer_step_post_hook(_after))


def recover(stash: AmpStash) -> None:
    """See to a step that has raised: give gradients back that were out of sight."""
    if stash.begun is not None and not _is_running(stash.begun.frame):
        begun, stash.begun = stash.begun, None
        _show(begun)
        _scale_again(stash, begun)


def _is_running(frame: FrameType) -> bool:
    each: FrameType | None = sys._getframe(1)
    while each is not None and each is not frame:
        each = each.f_back
    return each is not None


@runs_itself_eagerly
def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    stash = stash_of(optimizer)
    if stash is None:
        return None
    return _begin(stash, sys._getframe(1), args, kwargs)


@runs_eagerly
def _begin(stash: AmpStash, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    recover(stash)
    if stash.begun is not None:
        # A class that calls the ``step`` of its base comes here twice.
        return None
    stash.begun = Begun(frame)
    closures = [each for each in (*args[1:], *kwargs.values()) if _is_closure(each)]
    if not closures:
        _unscale_for(stash, stash.begun)
        if stash.pending is not None:
            if not _needs_gradients(stash.optimizer):
                # What the step does by itself, as counting steps in its groups or decaying weights, is undone.
                stash.begun.kept, stash.begun.failed = Kept(stash.optimizer), True
                stash.begun.numbers = _numbers_of(stash.optimizer)
            _hide(stash)
        casts.off_during(frame)
        return None
    stash.begun.kept = Kept(stash.optimizer)
    stash.begun.numbers = _numbers_of(stash.optimizer)
    casts.off_during(frame)
    instead = {id(each): _Closure(each, stash, stash.begun) for each in closures}
    changed = tuple(instead.get(id(each), each) for each in args)
    return changed, {name: instead.get(id(each), each) for name, each in kwargs.items()}


@runs_itself_eagerly
def _after(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    stash = stash_of(optimizer)
    if stash is not None and stash.begun is not None and stash.begun.frame is sys._getframe(1):
        _end(stash, stash.begun)


@runs_eagerly
def _end(stash: AmpStash, begun: Begun) -> None:
    stash.begun = None
    casts.on_after(begun.frame)
    if begun.failed and begun.kept is not None:
        begun.kept.put_back()
        vars(stash.optimizer).update(begun.numbers)
    _show(begun)
    if stash.pending is not None:
        # They would be added to those of the next block; Apex took them away here too.
        for one in stash.having():
            _zero(one)
        stash.pending = None
    _scale_again(stash, begun)


def _needs_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether a step is known to do nothing without gradients, so that no copy of the state is needed to undo it."""
    return getattr(type(optimizer).step, "__module__", "").startswith(("torch.optim.", "mezzo.apex.optimizers."))


def _numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Give the counters that an optimizer keeps as attributes, but for PyTorch's own."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, bool | int | float) and not name.startswith("_opt")
    }


def _is_closure(given: object) -> bool:
    return callable(given) and not isinstance(given, Tensor | torch.nn.Module | type)


class _Closure:
    """A closure that evaluates the loss with casts on, and whose gradients are shown to the step only if they are finite."""

    def __init__(self, closure: Callable[..., Any], stash: AmpStash, begun: Begun) -> None:
        self._closure, self._stash, self._begun = closure, stash, begun
        self._last: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stash = self._stash
        if self._begun.failed:
            # What the step does from here on is undone; nothing new is to be learned.
            return self._last
        with casts.with_casts():
            self._last = self._closure(*args, **kwargs)
        _unscale_for(stash, self._begun)
        if stash.pending is not None:
            self._begun.failed = True
            _hide(stash)
        return self._last


def _unscale_for(stash: AmpStash, begun: Begun) -> None:
    """Let a step see unscaled gradients: in a block that is open, or after one that has left them scaled."""
    if stash.factor == 1.0 and stash.block is None:
        return
    block = stash.block
    if block is not None:
        begun.scale = block.scale
        block.told = unscale([stash], stash.holders(), block.scalers, arm=[stash], told=block.told)
        return
    if not stash.having():
        stash.factor = 1.0
        return
    if not stash.warned:
        stash.warned = True
        warnings.warn(_STILL_SCALED, RuntimeWarning, stacklevel=2)
    together = [stash, *(other for other in sharing([stash]) if other.factor == stash.factor and other.block is None)]
    parameters = {id(one): one for each in together for one in each.holders()}
    unscale(together, list(parameters.values()), [] if stash.scaler is None else [stash.scaler], arm=together)


def _scale_again(stash: AmpStash, begun: Begun) -> None:
    """After a step in a block: bring gradients to the block's scale again, in which its losses add to them."""
    if stash.block is None or begun.scale == 1.0:
        return
    if stash.factor != begun.scale:
        multiply(stash.having(), begun.scale / stash.factor)
        stash.factor = begun.scale
    begun.scale = 1.0


def _hide(stash: AmpStash) -> None:
    """Take the gradients away, and say so as Apex did: logs are parsed for this line."""
    begun, pending = stash.begun, stash.pending
    if begun is None or pending is None:
        return
    scaler, loss_id = pending
    what = "reducing loss scale to" if scaler.dynamic else "static loss scale"
    maybe_print(f"Gradient overflow.  Skipping step, loss scaler {loss_id} {what} {scaler.loss_scale()}")
    for one in stash.having():
        gradient = one.grad
        if gradient is not None:
            begun.hidden.append((one, gradient))
            one.grad = None


def _show(begun: Begun) -> None:
    for one, gradient in begun.hidden:
        one.grad = gradient
    begun.hidden = []


@torch.no_grad()
def _zero(one: Tensor) -> None:
    if one.grad is not None and one.grad.layout is torch.strided:
        one.grad.zero_()
    else:
        one.grad = None
