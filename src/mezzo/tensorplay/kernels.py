"""The wrapper that stands at a choke point while a region is open: it asks the thread's plan and acts by it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mezzo.tensorplay.current import CURRENT
from mezzo.tensorplay.dtypes import OverriddenError

__all__ = ["wrap"]


def wrap(op: str, function: Any) -> Any:
    """Make the wrapper of an op.

    Args:
        op: The canonical op name.
        function: What stands at the choke point: a function of the extension module, a method of ``Tensor``, or a function
            in Python that is composed of ops. What that calls is not cast again: the rule is for the whole.

    Returns:
        A function. In a thread whose plan has no action for the op, or which has no plan, it just calls.
    """
    # A method of a class that pybind11 made is found bound or not, so it is taken as a plain function of ``self`` here.
    call = getattr(function, "__func__", function)
    make = _around_composition if inspect.isfunction(call) else _around_op
    return functools.update_wrapper(make(op, call), function)


def _around_op(op: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        plan = CURRENT.plan
        if plan is None or (action := plan.get(op)) is None:
            return call(*args, **kwargs)
        try:
            return action(call, args, kwargs)
        except OverriddenError:
            return call(*args, **kwargs)

    return wrapper


def _around_composition(op: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def whole(*args: Any, **kwargs: Any) -> Any:
        plan, CURRENT.plan = CURRENT.plan, None
        try:
            return call(*args, **kwargs)
        finally:
            CURRENT.plan = plan

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        plan = CURRENT.plan
        if plan is None or (action := plan.get(op)) is None:
            return call(*args, **kwargs)
        try:
            return action(whole, args, kwargs)
        except OverriddenError:
            return call(*args, **kwargs)

    return wrapper
