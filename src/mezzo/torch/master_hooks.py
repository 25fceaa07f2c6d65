"""When masters and model are brought together around an optimizer's step.

PyTorch calls an optimizer's hooks around its ``step``: before it the global ones first, after it those last. A global one
begins: it sees any optimizer that holds masters, be it a copy, out of a file or made by hand, and puts two hooks on it, one
that comes last before the step and one that comes first after it. So hooks of the user's own, on either side, see the
gradients and weights that count, and may change them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    _foreach_supported_types,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mezzo.torch.closures import closure_in
from mezzo.torch.eager import pause_compiling, resume_compiling, runs_eagerly, runs_itself_eagerly
from mezzo.torch.master_copies import at_attaching, attach, owner_of
from mezzo.torch.master_params import Master, MasterParameter, masters_in
from mezzo.torch.master_settings import Begun, Owner
from mezzo.torch.master_steps import (
    close_gradients,
    drop_values,
    fill_values,
    show_gradients,
    versions_of,
    write_back,
    write_back_changed,
)

__all__ = ["watch_steps"]

_lock = threading.Lock()
_watching: list[object] = []
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def watch_steps() -> None:
    """Have the steps of all optimizers looked at; once per process."""
    with _lock:
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_begin))
            _watching.append(register_optimizer_step_post_hook(_end))
            # PyTorch takes its multi-tensor steps by default for the classes on this list, on devices that have them.
            _foreach_supported_types.append(MasterParameter)


def _add_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [optimizer.register_step_pre_hook(_last_before), optimizer.register_step_post_hook(_first_after)]


at_attaching.append(_add_hooks)


def _owner_at(optimizer: torch.optim.Optimizer) -> Owner | None:
    first = next((one for group in optimizer.param_groups for one in group["params"] if isinstance(one, Master)), None)
    return owner_of(optimizer) if first is None else first.owner


@runs_itself_eagerly
def _begin(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    """Begin a step, as the first hook of all."""
    owner = _owner_at(optimizer)
    if owner is None:
        return None
    frame = sys._getframe(1)
    if owner.begun(optimizer, frame) is not None:
        # A class that calls the ``step`` of its base comes here twice.
        return None
    changed = _begin_step(optimizer, owner, frame, args, kwargs)
    # Last, since what runs eagerly puts it back: of the step itself nothing can be compiled.
    owner.steps[id(optimizer)].paused = pause_compiling()
    return changed


@runs_eagerly
def _begin_step(
    optimizer: torch.optim.Optimizer, owner: Owner, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Arguments | None:
    attach(optimizer, owner)
    _arrange(optimizer)
    close_gradients(optimizer)
    fill_values(optimizer, owner)
    closure = closure_in(optimizer, args[1:], kwargs)
    owner.steps[id(optimizer)] = Begun(frame, closure is not None, versions_of(optimizer))
    if closure is None:
        return None
    instead = _Closure(closure, optimizer, frame)
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": instead}
    return (args[0], instead, *args[2:]), kwargs


def _arrange(optimizer: torch.optim.Optimizer) -> None:
    """Have our hooks of an optimizer next to its step, whatever others have been added since."""
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    for hooks, ours, last in ((before, _last_before, True), (after, _first_after, False)):
        key = next((key for key, hook in hooks.items() if hook is ours), None)
        if key is not None:
            hooks.move_to_end(key, last=last)


class _Closure:
    """A closure that evaluates the model with the weights of the moment, for optimizers that call it more than once.

    Args:
        closure: The one that the step was called with.
        optimizer: Whose step.
        frame: Of PyTorch's wrapper around ``step``.
    """

    def __init__(self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer, frame: FrameType) -> None:
        self._closure, self._optimizer, self._frame = closure, optimizer, frame
        self._versions = versions_of(optimizer)

    def __call__(self) -> Any:
        close_gradients(self._optimizer)
        versions = versions_of(self._optimizer)
        if versions != self._versions:
            self._versions = versions
            write_back(masters_in(self._optimizer), None)
        result = self._closure()
        show_gradients(self._optimizer, self._frame)
        return result


@runs_eagerly
def _last_before(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    """Show the step its gradients, after all hooks that may have changed them."""
    frame = sys._getframe(1)
    begun = _begun_here(optimizer, frame)
    if begun is not None and not begun.has_closure:
        show_gradients(optimizer, frame)


@runs_eagerly
def _first_after(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    """Refresh the model, before any hook looks at it."""
    begun = _begun_here(optimizer, sys._getframe(1))
    if begun is not None:
        begun.versions = write_back_changed(optimizer, begun.versions)


@runs_itself_eagerly
def _end(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    """End a step, after all hooks of the optimizer."""
    owner = _owner_at(optimizer)
    begun = None if owner is None else _begun_here(optimizer, sys._getframe(1))
    if owner is None or begun is None:
        return
    del owner.steps[id(optimizer)]
    _end_step(optimizer, begun)
    resume_compiling(begun.paused)


@runs_eagerly
def _end_step(optimizer: torch.optim.Optimizer, begun: Begun) -> None:
    now = versions_of(optimizer)
    written = [
        one for one, before, after in zip(masters_in(optimizer), begun.versions, now, strict=True) if before != after
    ]
    if written:
        # By a hook of the user's.
        write_back(written, None)
    drop_values(optimizer)


def _begun_here(optimizer: torch.optim.Optimizer, frame: FrameType) -> Begun | None:
    owner = _owner_at(optimizer)
    begun = None if owner is None else owner.steps.get(id(optimizer))
    return begun if begun is not None and begun.frame is frame else None
