"""Decorating with a region: a call, or each step of a generator or coroutine, runs in it, and nobody else does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorplay
from tensorplay import nn

from mezzo.stepwise import Region, inherited, is_defined, python_method, run_in

__all__ = ["decorate"]


def decorate(region: Region, target: Any) -> Any:
    """Make what a decorator gives back for anything that may stand under it.

    Args:
        region: What each call, or each step, is to run in.
        target: A callable, a ``staticmethod`` or ``classmethod`` object, or a class.

    Returns:
        For a callable, one of its kind; for a method object, one of its kind; a class is changed and given back. Of a
        `tensorplay.nn.Module` ``forward`` runs in the region, of any other class the construction.

    Raises:
        TypeError: The class cannot be decorated; it is then as it was.
    """
    if isinstance(target, staticmethod | classmethod):
        return type(target)(decorate(region, target.__func__))
    if isinstance(target, type):
        return _decorate_class(region, target)
    wrapper: Any = run_in(region, target, like=_body(target))
    wrapper.__script_unsupported = "@autocast() decorator is not supported in script mode"
    if isinstance(target, nn.Module):
        # A reentrant checkpoint gives gradients to what it finds so, and to no other weights.
        wrapper.parameters = target.parameters
    return wrapper


def _body(func: Callable[..., Any]) -> Callable[..., Any]:
    """Find the function whose frame runs when a callable is called."""
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, nn.Module):
        forward: Callable[..., Any] = func.forward
        return forward
    return func if inspect.isroutine(func) else type(func).__call__


def _decorate_class(region: Region, decorated: type) -> type:
    if issubclass(decorated, tensorplay.autograd.Function):
        msg = (
            f"autocast cannot decorate {decorated.__name__}, a tensorplay.autograd.Function: no instance of it is made. "
            "Decorate its forward with mezzo.tensorplay.custom_fwd and its backward with mezzo.tensorplay.custom_bwd."
        )
        raise TypeError(msg)
    if is_defined(decorated):
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
        func = found if name in vars(decorated) else inherited(decorated, name)
        wrapper = functools.update_wrapper(run_in(region, func, like=found), found)
        setattr(decorated, name, staticmethod(wrapper) if name == "__new__" else wrapper)
    return decorated


def _method(decorated: type, name: str) -> Callable[..., Any] | None:
    """Find the Python function that a class has or inherits under a name; not the ``forward`` that every module has."""
    found = python_method(decorated, name)
    return None if found is vars(nn.Module).get("forward") else found
