"""Running a call, or each step of what a call makes, in a context, for any framework.

A generator, coroutine or asynchronous generator computes in steps, and between two of them its caller or another task runs,
in the same thread and so in the same state. So the context is entered for each step and left at its end.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

__all__ = ["Call", "Region", "call_in", "inherited", "is_defined", "python_method", "run_in"]

Region = AbstractContextManager[Any]
"""A context manager that may be entered again, while it is open and by several threads."""

Call = Callable[[Region, Callable[..., Any]], Callable[..., Any]]
"""How a plain function is wrapped."""

F = TypeVar("F", bound=Callable[..., Any])


def call_in(region: Region, func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a plain function so that each call runs in a region.

    Args:
        region: The region.
        func: The function.

    Returns:
        The wrapper, still without the function's name and documentation.
    """

    def decorated(*args: Any, **kwargs: Any) -> Any:
        with region:
            return func(*args, **kwargs)

    return decorated


def run_in(region: Region, func: F, like: Callable[..., Any], call: Call = call_in) -> F:
    """Wrap a callable so that each call, or each step of what a call makes, runs in a region.

    Args:
        region: The region.
        func: The callable.
        like: The function whose kind the wrapper is to have: the one whose frame runs when ``func`` is called.
        call: What wraps it if it is a plain function.

    Returns:
        A function of the same kind: of a generator function a generator function, of a coroutine function a coroutine
        function, of an asynchronous generator function one of these. ``functools.wraps`` is applied.

    Example:
        >>> from contextlib import nullcontext
        >>> def count():
        ...     yield 1
        >>> list(run_in(nullcontext(), count, like=count)())
        [1]
    """
    if inspect.isgeneratorfunction(like):
        wrapper = _generator(region, func)
        if like.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE:  # made by types.coroutine, so it can be awaited
            wrapper = types.coroutine(wrapper)
    elif inspect.iscoroutinefunction(like):
        wrapper = _coroutine(region, func)
    elif inspect.isasyncgenfunction(like):
        wrapper = _async_generator(region, func)
    else:
        wrapper = call(region, func)
    return cast("F", functools.update_wrapper(wrapper, func))


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


def is_defined(decorated: type) -> bool:
    """Say whether a class can be found by its name; not so while the decorators over its definition run.

    Args:
        decorated: The class.

    Returns:
        True if its module has it under its name already.
    """
    found: Any = sys.modules.get(decorated.__module__)
    for name in decorated.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is decorated


def python_method(decorated: type, name: str) -> Callable[..., Any] | None:
    """Find the Python function that a class has or inherits under a name.

    Args:
        decorated: The class.
        name: The method's name; a ``staticmethod`` such as ``__new__`` is looked into.

    Returns:
        The function; None if there is none, or what is there is not written in Python.
    """
    found = inspect.getattr_static(decorated, name, None)
    if isinstance(found, staticmethod):
        found = found.__func__
    return found if inspect.isfunction(found) else None


def inherited(decorated: type, name: str) -> Callable[..., Any]:
    """Make a method that passes its call on to the next class in line, which need not be a base of this one.

    Args:
        decorated: The class that is to have the method.
        name: The method's name.

    Returns:
        A function to be set on the class.
    """

    def passing_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(super(decorated, self), name)
        return method(self, *args, **kwargs) if name == "__new__" else method(*args, **kwargs)

    return passing_on
