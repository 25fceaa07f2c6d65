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

from mezzo.torch.eager import pause_compiling, resume_compiling, runs_eagerly, runs_itself_eagerly

from .copies import at_attaching, attach, owner_of
from .params import Made, Master, MasterParameter, masters_in
from .settings import Begun, Owner
from .steps import (
    close_gradients,
    drop_values,
    fill_values,
    show_gradients,
    versions_of,
    write_back,
    write_back_changed,
    write_back_moved,
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
    if not Made.count:  # in this process
        return owner_of(optimizer)
    groups = (group.get("params", ()) for group in optimizer.param_groups)
    first = next((one for parameters in groups for one in parameters if isinstance(one, Master)), None)
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
    given = [each for each in (*args[1:], *kwargs.values()) if _is_closure(each)]
    owner.steps[id(optimizer)] = Begun(frame, bool(given), versions_of(optimizer))
    if not given:
        for one in masters_in(optimizer):
            # Until the step has ended the model is behind, and stays so if that fails: its next forward pass sees to it.
            one.written = -1
        return None
    instead = {id(each): _Closure(each, optimizer, frame) for each in given}
    changed = tuple(instead.get(id(each), each) for each in args)
    return changed, {name: instead.get(id(each), each) for name, each in kwargs.items()}


def _is_closure(given: object) -> bool:
    """Say whether an argument of a step may be a function that evaluates the model, whatever it is called."""
    return callable(given) and not isinstance(given, torch.Tensor | torch.nn.Module | type)


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        close_gradients(self._optimizer)
        self._versions = write_back_moved(self._optimizer, self._versions)
        result = self._closure(*args, **kwargs)
        show_gradients(self._optimizer, self._frame)
        return result


@runs_eagerly
def _last_before(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    """Show the step its gradients, after all hooks that may have changed them."""
    frame = sys._getframe(1)
    begun = _begun_here(optimizer, frame)
    if begun is not None:
        # What a closure is to evaluate is not stepped with before.
        show_gradients(optimizer, frame, step=not begun.has_closure)


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
