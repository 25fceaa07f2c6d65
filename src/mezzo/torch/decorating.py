"""Decorating with a region: a call, or each step of a generator or coroutine, runs in it, and nobody else does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from mezzo import stepwise
from mezzo.stepwise import Region
from mezzo.torch.graphs import InGraph

__all__ = ["decorate", "run_in"]

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
    wrapper = stepwise.run_in(region, func, _body(func if like is None else like), _function)
    # TorchScript reads this attribute and shows its text.
    wrapper.__script_unsupported = "@autocast() decorator is not supported in script mode"  # type: ignore[attr-defined]
    return wrapper


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


def _decorate_class(region: Region, decorated: type) -> type:
    if issubclass(decorated, torch.autograd.Function):
        msg = (
            f"autocast cannot decorate {decorated.__name__}, a torch.autograd.Function: no instance of it is made. Decorate "
            "its forward with mezzo.torch.custom_fwd and its backward with mezzo.torch.custom_bwd."
        )
        raise TypeError(msg)
    if stepwise.is_defined(decorated):
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
        func = found if name in vars(decorated) else stepwise.inherited(decorated, name)
        wrapper = functools.update_wrapper(run_in(region, func, like=found), found)
        setattr(decorated, name, staticmethod(wrapper) if name == "__new__" else wrapper)
    return decorated


def _method(decorated: type, name: str) -> Callable[..., Any] | None:
    """Find the Python function that a class has or inherits under a name; not the ``forward`` that every module has."""
    found = stepwise.python_method(decorated, name)
    return None if found is nn.Module.forward else found
