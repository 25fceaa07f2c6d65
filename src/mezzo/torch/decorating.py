"""Decorating with a region: a call, or each step of a generator or coroutine, runs in it, and nobody else does.

A generator, coroutine or asynchronous generator computes in steps, and between two of them its caller or another task runs,
in the same thread and so in the same state. So the region is entered for each step and left at its end.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from mezzo.torch.graphs import InGraph

__all__ = ["decorate", "run_in"]

Region = AbstractContextManager[Any]
"""A context manager that may be entered again, while it is open and by several threads."""

F = TypeVar("F", bound=Callable[..., Any])


def decorate(region: Region, target: Any) -> Any:
    """Make what a decorator gives back for anything that may stand under it.

    Args:
        region: What each call, or each step, is to run in.
        target: A callable, a ``staticmethod`` or ``classmethod`` object, or a class.

    Returns:
        For a callable, see `run_in`; for a method object, one of its kind; a class is changed and given back. Of a
        `torch.nn.Module` ``forward`` runs in the region, of any other class the construction: ``__new__`` and ``__init__``.

    Raises:
        TypeError: The class cannot be decorated; it is then as it was.
    """
    if isinstance(target, staticmethod | classmethod):
        return type(target)(run_in(region, target.__func__))
    if isinstance(target, type):
        return _decorate_class(region, target)
    return run_in(region, target)


def run_in(region: Region, func: F, like: Callable[..., Any] | None = None) -> F:
    """Wrap a callable so that each call, or each step of what a call makes, runs in a region.

    Args:
        region: The region.
        func: The callable.
        like: Whose kind the wrapper is to have; ``func`` itself if left out.

    Returns:
        A function of the same kind: of a generator function a generator function, of a coroutine function a coroutine
        function, of an asynchronous generator function one of these. ``functools.wraps`` is applied.
    """
    body = _body(func if like is None else like)
    if inspect.isgeneratorfunction(body):
        wrapper = _generator(region, func)
        if body.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE:  # made by types.coroutine, so it can be awaited
            wrapper = types.coroutine(wrapper)
    elif inspect.iscoroutinefunction(body):
        wrapper = _coroutine(region, func)
    elif inspect.isasyncgenfunction(body):
        wrapper = _async_generator(region, func)
    else:
        wrapper = _function(region, func)
    functools.update_wrapper(wrapper, func)
    # TorchScript reads this attribute and shows its text.
    wrapper.__script_unsupported = "@autocast() decorator is not supported in script mode"  # type: ignore[attr-defined]
    return cast("F", wrapper)


def _body(func: Callable[..., Any]) -> Callable[..., Any]:
    """Find the function whose frame runs when a callable is called."""
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, nn.Module):
        return func.forward
    return func if inspect.isroutine(func) else type(func).__call__


def _function(region: Region, func: Callable[..., Any]) -> Callable[..., Any]:
    def decorated(*args: Any, **kwargs: Any) -> Any:
        with InGraph(region) if is_dynamo_compiling() else region:
            return func(*args, **kwargs)

    return decorated


def _generator(region: Region, func: Callable[..., Any]) -> Callable[..., Any]:
    def decorated(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with region:
            inner = func(*args, **kwargs)
        step: Any = functools.partial(inner.send, None)
        try:
            while True:
                with region:
                    value = step()
                # Not inside the handler: there the thrown error would be the context of all that the body raises later.
                try:
                    step = functools.partial(inner.send, (yield value))
                except BaseException as error:  # noqa: BLE001 - what comes in, by close() too, is the body's to answer
                    step = functools.partial(inner.throw, error)
        except StopIteration as stop:
            return stop.value
        finally:
            # An error's traceback refers to this frame: with these it would live, and all it refers to with it, until the
            # next collection of garbage.
            del inner, step

    return decorated


def _coroutine(region: Region, func: Callable[..., Any]) -> Callable[..., Any]:
    async def decorated(*args: Any, **kwargs: Any) -> Any:
        return await _Stepwise(region, lambda: func(*args, **kwargs))

    return decorated


def _async_generator(region: Region, func: Callable[..., Any]) -> Callable[..., Any]:
    async def decorated(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with region:
            inner = func(*args, **kwargs)
        step: Any = functools.partial(_first_step, inner)
        try:
            while True:
                value = await _Stepwise(region, step)
                try:
                    step = functools.partial(inner.asend, (yield value))
                except BaseException as error:  # noqa: BLE001 - as above
                    step = functools.partial(inner.athrow, error)
        except StopAsyncIteration:
            return
        finally:
            del inner, step  # as above

    return decorated


def _first_step(inner: AsyncGenerator[Any, Any]) -> Awaitable[Any]:
    """Start an asynchronous generator unseen by the event loop, which would close it outside of the region.

    The loop sees, and closes, the decorated one; that one closes this.
    """
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return inner.asend(None)
    finally:
        sys.set_asyncgen_hooks(*hooks)


class _Stepwise:
    """Something awaitable, each step of which runs in a region. It can be awaited once."""

    def __init__(self, region: Region, start: Callable[[], Awaitable[Any]]) -> None:
        self._region, self._start = region, start

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Generator[Any, Any, Any] = _generator(self._region, self._begin)()
        return steps

    def _begin(self) -> Generator[Any, Any, Any]:
        start = self._start
        del self._start  # it may hold an error, as above
        return start().__await__()


def _decorate_class(region: Region, decorated: type) -> type:
    if issubclass(decorated, torch.autograd.Function):
        msg = (
            f"autocast cannot decorate {decorated.__name__}, a torch.autograd.Function: no instance of it is made. Decorate "
            "its forward with mezzo.torch.custom_fwd and its backward with mezzo.torch.custom_bwd."
        )
        raise TypeError(msg)
    if _is_defined(decorated):
        msg = (
            f"{decorated.__name__} is defined already, and decorating it would change it for all who use it. Put autocast "
            "over the definition of the class or of a subclass, or decorate the function that makes or calls it."
        )
        raise TypeError(msg)
    names = ("forward",) if issubclass(decorated, nn.Module) else ("__new__", "__init__")
    methods = {name: found for name in names if (found := _method(decorated, name)) is not None}
    if not methods:
        msg = (
            f"autocast has nothing to run in the region in the class {decorated.__name__}, which has no "
            f"{' and no '.join(names)} written in Python. Decorate its methods one by one."
        )
        raise TypeError(msg)
    for name, found in methods.items():
        func = found if name in vars(decorated) else _inherited(decorated, name)
        wrapper = functools.update_wrapper(run_in(region, func, like=found), found)
        setattr(decorated, name, staticmethod(wrapper) if name == "__new__" else wrapper)
    return decorated


def _is_defined(decorated: type) -> bool:
    """Say whether a class can be found by its name; not so while the decorators over its definition run."""
    found: Any = sys.modules.get(decorated.__module__)
    for name in decorated.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is decorated


def _method(decorated: type, name: str) -> Callable[..., Any] | None:
    """Find the Python function that a class has or inherits under a name."""
    found = inspect.getattr_static(decorated, name, None)
    if isinstance(found, staticmethod):
        found = found.__func__
    return found if inspect.isfunction(found) and found is not nn.Module.forward else None


def _inherited(decorated: type, name: str) -> Callable[..., Any]:
    """Make a method that passes its call on to the next class in line, which need not be a base of this one."""

    def passing_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(super(decorated, self), name)
        return method(self, *args, **kwargs) if name == "__new__" else method(*args, **kwargs)

    return passing_on
