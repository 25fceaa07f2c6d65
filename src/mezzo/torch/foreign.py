"""`register_function`: a cast policy for functions that PyTorch does not list.

What autocast can cast are ops. A function that checks or computes before it reaches one, or that brings a kernel of its own,
gets whatever dtypes the ops around it left. Registered, it is called with its tensors cast, and with autocast off, as
PyTorch calls the ops that it lists.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from mezzo.decision import CastPolicy, parse_cast_policy
from mezzo.errors import PolicyError, UnknownOpError, near
from mezzo.rules import resolve_rules
from mezzo.torch.foreign_calls import call_with_casts

__all__ = ["Registration", "register_function"]

F = TypeVar("F", bound=Callable[..., Any])

_ALLOWED = (CastPolicy.LOWER_PRECISION_FP, CastPolicy.FP32, CastPolicy.PROMOTE, CastPolicy.BANNED)
_NOTHING = object()
_HOMES_OF_OPS = (torch, Tensor, nn.functional, torch.linalg, torch.fft, torch.special)


class Registration:
    """A function's cast policy in force; also a context manager that removes it at the end.

    Attributes:
        name: What the function is called in messages.
        cast_policy: Its cast policy.
        function: The function as it was.
    """

    def __init__(self, name: str, cast_policy: CastPolicy, function: Callable[..., Any]) -> None:
        self.name = name
        self.cast_policy = cast_policy
        self.function = function
        self._in_force = True
        self._place: tuple[Any, str, Any] | None = None

    def remove(self) -> None:
        """Put the function back; twice is as good as once.

        Where the attribute has been replaced by something else since, or the function was imported elsewhere while it was
        registered, the wrapper stays and hands every call through.
        """
        self._in_force = False
        if self._place is None:
            return
        (owner, name, before), self._place = self._place, None
        placed = vars(owner).get(name)
        if _registration(getattr(placed, "__func__", placed)) is not self:
            return
        if before is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    def __enter__(self) -> Registration:
        """Give itself; the cast policy is in force since the call."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Call `remove`."""
        self.remove()

    def __repr__(self) -> str:
        state = "" if self._in_force else ", removed"
        return f"Registration({self.name!r}, {str(self.cast_policy)!r}{state})"


@overload
def register_function(module: object, name: str, cast_policy: str) -> Registration: ...
@overload
def register_function(*, cast_policy: str) -> Callable[[F], F]: ...
def register_function(module: Any = _NOTHING, name: Any = _NOTHING, cast_policy: Any = _NOTHING) -> Any:
    """Give a function that PyTorch does not list a cast policy; as a call, or as a decorator of one's own function.

    In an enabled region, mezzo's or PyTorch's, on the device of a tensor among the arguments, the eligible tensors
    (floating, not float64, on that device) in any pytree of arguments are cast, and the function runs with autocast off
    there. Gradients come back in the dtypes that came in. Elsewhere the function is called as it is. Where the policy in
    force is ``"fp32"``, ``lower_precision_fp`` and ``promote`` are ``fp32``.

    Args:
        module: The module, class or object whose attribute is replaced, until `Registration.remove` puts it back. Code that
            has taken the function out of it before (``from module import name``) is not reached; register it there too.
        name: The attribute. On a `torch.autograd.Function` from elsewhere, ``"apply"``. On the class of a module,
            ``"forward"`` is that of all its instances; their weights are not cast.
        cast_policy: ``"lower_precision_fp"`` (to the region's dtype), ``"fp32"``, ``"promote"`` (to the widest dtype that
            came) or ``"banned"`` (a call in a region raises).

    Returns:
        A `Registration`. The decorator returns the wrapped function; ``function.registration.remove()`` ends it.

    Raises:
        UnknownOpError: ``module`` has no such attribute; near names are offered.
        PolicyError: The cast policy is not one of these, the function is registered already, or it is one that is ruled in
            another way: an op, or a method of a module instance.
        TypeError: An argument is missing, or the attribute cannot be called or replaced.

    A registration is for all threads.

    Example:
        >>> import torch, types
        >>> from mezzo.torch import autocast, register_function
        >>> def attend(q, k):
        ...     if q.dtype != k.dtype:
        ...         raise TypeError("q and k differ")
        ...     return q @ k.mT
        >>> library = types.SimpleNamespace(attend=attend)
        >>> registered = register_function(library, "attend", "lower_precision_fp")
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     print(library.attend(torch.ones(2, 4), torch.ones(2, 4).bfloat16()).dtype)
        torch.bfloat16
        >>> registered.remove()

        >>> @register_function(cast_policy="fp32")
        ... def energy(x):
        ...     return x.square().sum()
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     print(energy(torch.ones(2).bfloat16()).dtype)
        torch.float32
    """
    if cast_policy is _NOTHING or (module is _NOTHING) != (name is _NOTHING):
        msg = (
            "register_function takes (module, name, cast_policy), or only cast_policy= as a decorator: "
            "@register_function(cast_policy='lower_precision_fp')."
        )
        raise TypeError(msg)
    parsed = _parse(cast_policy)
    if module is _NOTHING:
        return functools.partial(_decorate, parsed)
    return _replace(module, name, parsed)


def _parse(cast_policy: object) -> CastPolicy:
    parsed = parse_cast_policy(cast_policy)
    if parsed not in _ALLOWED:
        msg = f"{str(parsed)!r} is a rule for ops, not for functions; allowed are {', '.join(_ALLOWED)}."
        raise PolicyError(msg)
    return parsed


def _decorate(cast_policy: CastPolicy, function: F) -> F:
    if not callable(function):
        msg = f"register_function decorates functions, got {type(function).__name__}; put it under @staticmethod."
        raise TypeError(msg)
    return cast("F", _wrapped(_new(getattr(function, "__qualname__", repr(function)), cast_policy, function)))


def _replace(owner: object, name: str, cast_policy: CastPolicy) -> Registration:
    if not isinstance(name, str):
        msg = f"register_function: the name of the attribute must be a string, got {name!r}."
        raise TypeError(msg)
    if isinstance(owner, str):
        msg = (
            f"register_function takes the module, not its name {owner!r}: import it, and call "
            f"register_function({owner}, {name!r}, {str(cast_policy)!r})."
        )
        raise TypeError(msg)
    shown = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
    if not hasattr(owner, "__dict__"):
        msg = f"{shown} cannot be replaced: {type(owner).__name__} objects have fixed attributes."
        raise TypeError(msg)
    if isinstance(owner, nn.Module):
        msg = f"{shown} is a method of a torch.nn.Module, which is not rewritten; use set_precision for its forward."
        raise PolicyError(msg)
    function = getattr(owner, name, _NOTHING)
    if function is _NOTHING:
        msg = f"{shown} does not exist.{near(name, dir(owner))}"
        raise UnknownOpError(msg)
    _refuse_op(owner, shown, cast_policy)
    registration = _new(shown, cast_policy, function)
    before = vars(owner).get(name, _NOTHING)
    wrapper: Any = _wrapped(registration)
    if isinstance(owner, type) and not _takes_self(inspect.getattr_static(owner, name)):
        wrapper = staticmethod(wrapper)
    setattr(owner, name, wrapper)
    registration._place = (owner, name, before)
    return registration


def _refuse_op(owner: object, shown: str, cast_policy: CastPolicy) -> None:
    """Refuse to replace an op of PyTorch's under one of its names, past which ``x.mm`` or ``torch.mm`` would still go."""
    if not any(owner is home for home in _HOMES_OF_OPS):
        return
    try:
        resolve_rules({shown: cast_policy}, "torch")
    except UnknownOpError:
        return
    except PolicyError as error:
        msg = f"{shown} is an op of PyTorch's, which a policy rules: {error}"
        raise PolicyError(msg) from None
    msg = f"{shown} is an op of PyTorch's, so a policy rules it: policy.override({{{shown!r}: {str(cast_policy)!r}}})."
    raise PolicyError(msg)


def _takes_self(attribute: object) -> bool:
    """Say whether a class's attribute is a method of its instances; the wrapper is then to be one too."""
    return hasattr(attribute, "__get__") and not isinstance(
        attribute, staticmethod | classmethod | types.ClassMethodDescriptorType
    )


def _new(name: str, cast_policy: CastPolicy, function: Any) -> Registration:
    if not callable(function):
        msg = f"{name} is a {type(function).__name__}, and register_function takes functions."
        raise TypeError(msg)
    if isinstance(function, type):
        msg = f"{name} is a class, and register_function takes functions; name one of its methods."
        raise TypeError(msg)
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        msg = f"{name} does its work after the call, as a generator or coroutine; register the function that it calls."
        raise TypeError(msg)
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        op = str(function).replace(".", "::", 1)
        msg = f"{name} is an op, so a policy can name it: policy.override({{{op!r}: {str(cast_policy)!r}}})."
        raise PolicyError(msg)
    if (known := _registration(function)) is not None and known._in_force:
        msg = f"{name} is registered already, as {str(known.cast_policy)!r}; call remove() on that registration first."
        raise PolicyError(msg)
    return Registration(name, cast_policy, function)


def _registration(function: Any) -> Registration | None:
    found = getattr(function, "registration", None)
    return found if isinstance(found, Registration) else None


def _wrapped(registration: Registration) -> Callable[..., Any]:
    function = registration.function

    @functools.wraps(function)
    def registered(*args: Any, **kwargs: Any) -> Any:
        if not registration._in_force:
            return function(*args, **kwargs)
        return call_with_casts(registration.name, registration.cast_policy, function, args, kwargs)

    registered.registration = registration  # type: ignore[attr-defined]
    return registered
