"""The wrapper that stands at a choke point while a region is open: it asks the thread's plan and acts by it."""

from __future__ import annotations

import functools
from typing import Any

from mezzo.tensorplay.current import CURRENT

__all__ = ["wrap"]


def wrap(op: str, function: Any) -> Any:
    """Make the wrapper of an op.

    Args:
        op: The canonical op name.
        function: What stands at the choke point: a function of the extension module, or a method of ``Tensor``.

    Returns:
        A function. In a thread whose plan has no action for the op, or which has no plan, it just calls.
    """
    # A method of a class that pybind11 made is found bound or not, so it is taken as a plain function of ``self`` here.
    call = getattr(function, "__func__", function)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        plan = CURRENT.plan
        if plan is None or (action := plan.get(op)) is None:
            return call(*args, **kwargs)
        return action(call, args, kwargs)

    return functools.update_wrapper(wrapper, function)
