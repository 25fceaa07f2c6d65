"""Turning the casts of O1 off and on again in a thread: for backward passes, steps and closures, and for the user."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from mezzo.apex.amp.cast_regions import ensure_here
from mezzo.apex.amp.cast_state import DISABLED, HERE, OFF, ON, Flags, Switched, drop_dead, nesting, undo
from mezzo.apex.amp.cast_state import started as _started
from mezzo.torch import graphs
from mezzo.torch.decorating import run_in
from mezzo.torch.eager import not_compiled_alone, runs_eagerly
from mezzo.torch.repairs import Repaired
from mezzo.torch.switch import KEY

__all__ = ["casts_active", "casts_on", "disable_casts", "off_during", "on_after", "with_casts", "without_casts"]

F = TypeVar("F", bound=Callable[..., Any])

_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_is_watching = torch._C._dispatch_tls_is_dispatch_key_included
_watch = torch._C._dispatch_tls_set_dispatch_key_included


def casts_active() -> bool:
    """Say whether O1 is on and the user has not disabled its casts in this thread.

    Returns:
        False before O1 is started and inside `disable_casts`; true in backward passes and steps too.
    """
    return _started() is not None and not any(one.kind is DISABLED for one in HERE.switched)


def _can_do_without_a_look(kind: str) -> bool:
    """Say whether calls may reach PyTorch without a look of mezzo's, since none will need a repair.

    In a backward pass there may be what checkpoint runs again; if no call was repaired the first time, none will be.
    """
    return kind is OFF and not Repaired.ever and _is_watching(KEY)


def _turn_off(kind: str, owner: object) -> None:
    here, started = HERE, _started()
    if here.switched:
        drop_dead()
    if started is None:
        here.switched.append(Switched(kind, owner, (), nesting()))
        return
    flags = tuple([(device, _is_enabled(device)) for device in started.device_types])
    stops = _can_do_without_a_look(kind)
    # First what undoes it: a KeyboardInterrupt may come at any line.
    here.switched.append(Switched(kind, owner, flags, nesting(), True if stops else None))
    for device, enabled in flags:
        if enabled:
            _set_enabled(device, False)
    if stops:
        _watch(KEY, False)


def _turn_back(owner: object) -> None:
    switched = HERE.switched
    for place in range(len(switched) - 1, -1, -1):
        if switched[place].owner is owner:
            undo(place)
            break
    if HERE.is_late and not switched:
        ensure_here()


def _flags_around() -> Flags:
    """Give the flags as they were before a backward pass or a step turned casts off; empty if none did."""
    flags: Flags = ()
    for one in reversed(HERE.switched):
        if one.kind is not OFF:
            break
        flags = one.flags
    return flags


class without_casts:  # noqa: N801 - a context manager, named as a function
    """Run a backward pass or an optimizer's step with casts off, in this thread; does nothing while O1 is off.

    What autograd runs again in the backward pass, for checkpointing, is cast as it was in the forward pass: the policy stays
    in force, and PyTorch's checkpoint turns casts on again. May be entered again while it is open.

    Example:
        >>> from mezzo.apex.amp.casts import start, stop, without_casts
        >>> handle = start(["cpu"], torch.bfloat16, {})
        >>> with without_casts():
        ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        torch.float32
        >>> stop()
    """

    __slots__ = ()

    @not_compiled_alone
    def __enter__(self) -> None:
        """Turn casts off."""
        _turn_off(OFF, self)

    @not_compiled_alone
    def __exit__(self, *exc_info: object) -> Literal[False]:
        """Put back what was found."""
        _turn_back(self)
        return False


class with_casts:  # noqa: N801 - as above
    """Turn casts on again inside `without_casts` and steps, for closures that evaluate the model.

    They are then as they were around the step: inside `disable_casts` they stay off.
    """

    __slots__ = ()

    @not_compiled_alone
    def __enter__(self) -> None:
        """Turn casts on."""
        flags = _flags_around()
        found = tuple([(device, _is_enabled(device)) for device, _ in flags])
        starts = bool(flags) and not _is_watching(KEY)
        HERE.switched.append(Switched(ON, self, found, nesting(), False if starts else None))
        for device, enabled in flags:
            _set_enabled(device, enabled)
        if starts:
            _watch(KEY, True)

    @not_compiled_alone
    def __exit__(self, *exc_info: object) -> Literal[False]:
        """Put back what was found."""
        _turn_back(self)
        return False


class disable_casts:  # noqa: N801 - Apex's name
    """Turn all casts of O1 off in this thread, those of `half_function` and its like too.

    A context manager, which may be nested, left by an exception and used while O1 is off; and a decorator. Where Apex turned
    casts off for all threads, this is the calling thread's.

    Example:
        >>> from mezzo.apex.amp.casts import disable_casts, start, stop
        >>> handle = start(["cpu"], torch.bfloat16, {})
        >>> with disable_casts():
        ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        torch.float32
        >>> stop()
    """

    def __init__(self) -> None:
        self._traced: list[Any] = []

    @not_compiled_alone
    def __enter__(self) -> None:
        """Turn casts off."""
        if is_dynamo_compiling():
            graphs._enter(self, _entry())
        else:
            _turn_off(DISABLED, self)

    @not_compiled_alone
    def __exit__(self, *exc_info: object) -> Literal[False]:
        """Put back what was found."""
        if is_dynamo_compiling():
            graphs.leave_in_graph(self)
        else:
            _turn_back(self)
        return False

    def __call__(self, func: F) -> F:
        """Decorate a function: each call runs with casts off. Of a generator or coroutine function each step does."""
        if not inspect.isfunction(func) or inspect.isgeneratorfunction(func) or _is_asynchronous(func):
            return run_in(self, func)

        @functools.wraps(func)
        def without(*args: Any, **kwargs: Any) -> Any:
            with disable_casts():  # made here, for torch.compile takes no other object
                return func(*args, **kwargs)

        return without  # type: ignore[return-value]


def _is_asynchronous(func: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func)


def _entry() -> graphs.Entry:
    """Work out, while code is traced, what disabling the casts sets and finds in its graph."""
    for function in (torch.set_autocast_enabled, torch.set_autocast_dtype, torch.set_autocast_cache_enabled):
        torch.fx.node.has_side_effect(function)  # or a pass over the graph takes them for calls that do nothing
    started = _started()
    devices = () if started is None else started.device_types
    found = [(device, _is_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    graphs._put_back_after_tracing(found)
    cache_enabled = torch.is_autocast_cache_enabled()
    return tuple((device, False, dtype) for device, _, dtype in found), tuple(found), cache_enabled, cache_enabled


# As torch.compiler.assume_constant_result does, which imports Dynamo.
_entry._dynamo_marked_constant = True  # type: ignore[attr-defined]


@runs_eagerly
def off_during(frame: FrameType) -> None:
    """Turn casts off in this thread as long as a frame runs.

    Args:
        frame: Of the step that begins. If it ends in an exception, whoever asks next (`ensure_here`, or one of the context
            managers here) sees that it is gone and turns casts on again.
    """
    ensure_here()
    _turn_off(OFF, frame)


@runs_eagerly
def on_after(frame: FrameType) -> None:
    """Turn casts on again at the end of a step.

    Args:
        frame: The one that `off_during` was given.
    """
    _turn_back(frame)


def casts_on(device_type: str) -> bool:
    """Say whether a decorated function casts tensors of a device in this thread.

    It does so where O1 casts ops, and in backward passes and steps, in which ops are not cast: so it was with Apex. It does
    not in a region of the user's that is disabled.

    Args:
        device_type: The device type.
    """
    started = _started()
    if started is None or device_type not in started.device_types or not casts_active():
        return False
    return _is_enabled(device_type) or _is_off_for_autograd(device_type)


# As above. Compiled code is bound to the state of autocast, which says the same.
casts_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_off_for_autograd(device_type: str) -> bool:
    here = HERE
    if here.switched:
        return nesting() == here.switched[-1].nesting and dict(_flags_around()).get(device_type, False)
    # One of autograd's threads: nothing was opened in it, and the thread whose pass it runs has turned casts off.
    return here.started is None and nesting() == 0 and torch._C._current_graph_task_id() != -1
