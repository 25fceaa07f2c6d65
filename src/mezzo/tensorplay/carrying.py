"""Carrying a thread's autocast state elsewhere: into another thread, or to a forward pass that is run again later.

TensorPlay's activation checkpoints run a function again in the backward pass, which is outside of the region, and raise
over what they find; so while a region is open a checkpointed function is bound to the state it is called in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, Literal, TypeVar, cast

import tensorplay

from mezzo.errors import RegionError
from mezzo.tensorplay.choke_points import acquire, release, replace_while_open
from mezzo.tensorplay.decorating import decorate
from mezzo.tensorplay.kernels import wrap
from mezzo.tensorplay.places import Place
from mezzo.tensorplay.plans import devices_here, ops_of
from mezzo.tensorplay.policies import get_default_policy
from mezzo.tensorplay.state import Snapshot, thread_state

__all__ = ["AutocastState", "bind", "capture", "watch_checkpoints"]

F = TypeVar("F", bound=Callable[..., Any])


class AutocastState:
    """A thread's autocast state, as `capture` found it: a context manager in which it is in force again.

    It may be entered several times, also while it is open, and by several threads.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        policies = {device.policy for device in snapshot.devices.values()} or {get_default_policy()}
        self._ops = frozenset[str]().union(*(ops_of(policy, devices_here()) for policy in policies))
        self._entries: dict[int, list[Snapshot]] = {}

    def __enter__(self) -> AutocastState:
        """Put the state in force in this thread."""
        acquire(self._ops, wrap)
        state = thread_state()
        self._entries.setdefault(get_ident(), []).append(state.open(get_default_policy()))
        state.put(self._snapshot)
        return self

    def __exit__(self, *exc_info: object) -> Literal[False]:
        """Restore what was in force; exceptions go on."""
        entries = self._entries.get(get_ident())
        if not entries:
            msg = (
                "AutocastState.__exit__() was called in a thread that has not entered it; use it in a `with` statement."
            )
            raise RegionError(msg)
        thread_state().close(entries.pop())
        release(self._ops)
        return False


def capture() -> AutocastState:
    """Take down the autocast state of this thread.

    Returns:
        A context manager in which that state is in force, in whatever thread it is entered. The state of one of
        TensorPlay's own regions is taken with the default policy.

    Example:
        >>> import tensorplay
        >>> from mezzo.tensorplay import autocast, capture
        >>> x = tensorplay.ones(2, 2)
        >>> with autocast("cpu"):
        ...     state = capture()
        >>> with state:
        ...     print((x @ x).dtype)
        tensorplay.bfloat16
    """
    state = thread_state()
    if state.depth:
        return AutocastState(state.now)
    before = state.open(get_default_policy())
    try:
        return AutocastState(before)
    finally:
        state.close(before)


def bind(function: F) -> F:
    """Tie a function to the autocast state in which it is bound; each call runs in that state.

    Args:
        function: Any callable, such as the target of a thread.

    Returns:
        A function of the same kind.

    Raises:
        TypeError: It cannot be called.

    Example:
        >>> import tensorplay
        >>> from mezzo.tensorplay import autocast, bind
        >>> with autocast("cpu"):
        ...     square = bind(lambda x: x @ x)
        >>> print(square(tensorplay.ones(2, 2)).dtype)
        tensorplay.bfloat16
    """
    if not callable(function):
        msg = f"bind() takes a function, got {function!r:.80}."
        raise TypeError(msg)
    return cast("F", decorate(capture(), function))


def watch_checkpoints() -> None:
    """Have checkpointed functions bound whenever a region is open; called once, when the adapter is imported."""
    name = "_activation_checkpoint"
    replace_while_open(Place(tensorplay._C._autograd, name, name), _binding)


class _Bound:
    """A checkpointed function, bound; TensorPlay looks for its parameters, and finds those of the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._bound = function, bind(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._bound(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_function", "_bound"):  # a copy asks before it has either
            raise AttributeError(name)
        return getattr(self._function, name)


def _binding(_name: str, checkpoint: Any) -> Any:
    def bound(function: Callable[..., Any], *options: Any, **named: Any) -> Any:
        return checkpoint(_Bound(function) if thread_state().depth else function, *options, **named)

    return functools.update_wrapper(bound, checkpoint)
