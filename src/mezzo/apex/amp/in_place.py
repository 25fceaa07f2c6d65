"""Functions that are wrapped in their place, in a module or a class, and put back."""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mezzo.apex.amp.decorators import with_cast_arguments
from mezzo.decision import CastPolicy
from mezzo.errors import AmpOptionError

__all__ = ["NOTHING", "Registration", "check_wrappable", "shown_as", "unwrap", "wrap"]

NOTHING = object()
"""What stands where an owner has no attribute of its own."""


def shown_as(owner: Any, name: str) -> str:
    """Say what a function is called in messages."""
    return f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"


@dataclass
class Registration:
    """A function's rule.

    Attributes:
        owner: The module or class.
        name: The attribute.
        rule: How its arguments are cast.
        op: Its name as an op; empty if it is wrapped in place.
        wrapper: What stands in its place; None if nothing does.
        before: What stood there in the owner itself.
    """

    owner: Any
    name: str
    rule: CastPolicy
    op: str
    wrapper: Any = None
    before: Any = NOTHING

    @property
    def shown(self) -> str:
        """What it is called in messages."""
        return shown_as(self.owner, self.name)


def check_wrappable(owner: Any, shown: str, function: Any) -> None:
    """See that a function can be replaced.

    Args:
        owner: The module or class.
        shown: What the function is called in messages.
        function: The function.

    Raises:
        AmpOptionError: It cannot.
    """
    if isinstance(owner, nn.Module):
        msg = (
            f"{shown} is a method of a model, which is not rewritten; decorate its class's method, or register "
            f"({type(owner).__name__}, {shown.rpartition('.')[2]!r})."
        )
        raise AmpOptionError(msg)
    if not hasattr(owner, "__dict__") or isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        msg = f"{shown} cannot be replaced: {type(owner).__name__} objects have fixed attributes."
        raise AmpOptionError(msg)


def wrap(one: Registration) -> None:
    """Put a wrapper in the place of a function, of the same kind as what is there.

    Args:
        one: The registration, which is not in force yet.

    Raises:
        AmpOptionError: The attribute cannot be set.
    """
    found = inspect.getattr_static(one.owner, one.name)
    if not isinstance(one.owner, type) or isinstance(found, types.ClassMethodDescriptorType):
        found = getattr(one.owner, one.name)
        wrapper = with_cast_arguments(found, one.rule)
        if isinstance(one.owner, type):
            wrapper = staticmethod(wrapper)
    elif isinstance(found, staticmethod | classmethod) or hasattr(found, "__get__"):
        wrapper = with_cast_arguments(found, one.rule)
    else:  # a callable object in a class is called without the instance
        wrapper = staticmethod(with_cast_arguments(found, one.rule))
    before = vars(one.owner).get(one.name, NOTHING)
    try:
        setattr(one.owner, one.name, wrapper)
    except (AttributeError, TypeError) as error:
        msg = f"{one.shown} cannot be replaced: {error}"
        raise AmpOptionError(msg) from None
    one.before, one.wrapper = before, wrapper


def unwrap(one: Registration) -> None:
    """Put a function back. What has been put into the place of the wrapper since stays.

    Args:
        one: The registration, be it in force or not.
    """
    wrapper, one.wrapper = one.wrapper, None
    if wrapper is None or vars(one.owner).get(one.name) is not wrapper:
        return
    if one.before is NOTHING:
        delattr(one.owner, one.name)
    else:
        setattr(one.owner, one.name, one.before)
