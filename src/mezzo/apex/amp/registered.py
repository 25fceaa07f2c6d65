"""`register_half_function` and its like: cast rules for functions that are named, by module and attribute.

An op of PyTorch's is ruled by the policy of O1, under all of its names. What is no op is wrapped in its place.
"""

from __future__ import annotations

from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.apex.amp.decorators import float_function, half_function, promote_function
from mezzo.apex.amp.in_place import NOTHING, Registration, check_wrappable, shown_as, unwrap, wrap
from mezzo.decision import CastPolicy
from mezzo.errors import AmpError, AmpOptionError, PolicyError, UnknownOpError, near
from mezzo.rules import resolve_rules

__all__ = [
    "close",
    "float_function",
    "give_back_registrations",
    "half_function",
    "promote_function",
    "put_back_registrations",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "reopen",
    "take_registrations",
]

_HOMES_OF_OPS = (torch, Tensor, nn.functional, torch.linalg, torch.special, torch.fft)
_COMPOSITES = frozenset({"gumbel_softmax", "normalize", "softmin"})
"""Functions that compute around an op that has a name of its own: a rule for them must not become one for that op."""
_KINDS = {
    CastPolicy.LOWER_PRECISION_FP: "register_half_function",
    CastPolicy.FP32: "register_float_function",
    CastPolicy.PROMOTE: "register_promote_function",
}


class _Registered:
    """All registrations of the process, by owner and name.

    Attributes:
        closed: Whether O1 has been started with them.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[int, str], Registration] = {}
        self.closed = False


_registered = _Registered()
_lock = RLock()


def register_half_function(module: Any, name: str) -> None:
    """Have a function called with its tensors in the lower-precision dtype of O1, from the next ``amp.initialize`` on.

    Args:
        module: The module or class that has the function: ``torch``, ``torch.Tensor``, ``torch.nn.functional``, or one of
            your own or of a library's.
        name: The attribute. For an op of PyTorch's the rule holds under each of its names, and goes before Apex's lists, the
            ban on ``binary_cross_entropy`` included. Anything else is wrapped, as by `half_function`, under this name.

    Raises:
        AmpOptionError: There is no such function, or it cannot be ruled; a ``ValueError``.
        AmpError: ``amp.initialize`` has been called already with O1. The same registration once more is fine.

    Registrations are for all threads, and stay for later calls of ``amp.initialize``.

    Example:
        >>> import torch
        >>> from mezzo.apex import amp
        >>> amp.register_half_function(torch, "einsum")
        >>> handle = amp.init()
        >>> torch.einsum("ij,jk->ik", torch.ones(2, 2), torch.ones(2, 2)).dtype
        torch.float16
        >>> handle._deactivate()
    """
    _register(module, name, CastPolicy.LOWER_PRECISION_FP)


def register_float_function(module: Any, name: str) -> None:
    """Have a function called with its tensors in float32; all else as for `register_half_function`.

    Args:
        module: The module or class.
        name: The attribute.

    Raises:
        AmpOptionError: There is no such function, or it cannot be ruled.
        AmpError: ``amp.initialize`` has been called already with O1.

    Example:
        >>> import torch
        >>> from mezzo.apex import amp
        >>> amp.register_float_function(torch, "sigmoid")
        >>> handle = amp.init()
        >>> torch.sigmoid(torch.ones(2).half()).dtype
        torch.float32
        >>> handle._deactivate()
    """
    _register(module, name, CastPolicy.FP32)


def register_promote_function(module: Any, name: str) -> None:
    """Have a function called with its tensors in the widest of their dtypes; all else as for `register_half_function`.

    Args:
        module: The module or class.
        name: The attribute.

    Raises:
        AmpOptionError: There is no such function, or it cannot be ruled.
        AmpError: ``amp.initialize`` has been called already with O1.

    Example:
        >>> import torch
        >>> from mezzo.apex import amp
        >>> amp.register_promote_function(torch, "hypot")
        >>> handle = amp.init()
        >>> torch.hypot(torch.ones(2).half(), torch.ones(2)).dtype
        torch.float32
        >>> handle._deactivate()
    """
    _register(module, name, CastPolicy.PROMOTE)


def take_registrations() -> dict[str, CastPolicy]:
    """Put the registrations in force that are no ops: they are wrapped in place.

    Returns:
        The rules for a policy, of those that are ops. The registrations stay; taken again, none is wrapped twice.
    """
    with _lock:
        for one in _registered.entries.values():
            if not one.op and one.wrapper is None:
                wrap(one)
        return {one.op: one.rule for one in _registered.entries.values() if one.op}


def put_back_registrations() -> None:
    """Forget all registrations, put back what was wrapped in place, and take new ones again.

    What has been put into the place of a wrapper since stays.
    """
    with _lock:
        for one in reversed(_registered.entries.values()):
            unwrap(one)
        _registered.entries.clear()
        _registered.closed = False


def give_back_registrations() -> None:
    """Put back what `take_registrations` has wrapped in place, while O1 is off; the registrations stay."""
    with _lock:
        for one in reversed(_registered.entries.values()):
            unwrap(one)


def close() -> None:
    """Refuse registrations from now on: O1 has been started, and they would come too late."""
    _registered.closed = True


def reopen() -> None:
    """Take registrations again."""
    _registered.closed = False


def _register(owner: Any, name: str, rule: CastPolicy) -> None:
    function = _check(owner, name, rule)
    shown = shown_as(owner, name)
    with _lock:
        known = _registered.entries.get((id(owner), name))
        if known is not None and known.rule is rule:
            return
        if _registered.closed:
            msg = (
                f"{_KINDS[rule]}({shown}) comes after amp.initialize, which has put the casts in force already; register "
                "functions before it."
            )
            raise AmpError(msg)
        if known is not None and known.wrapper is not None:
            msg = f"{shown} is registered with {_KINDS[known.rule]} already, since an earlier amp.initialize."
            raise AmpError(msg)
        op = _op(owner, name, shown, rule)
        if not op:
            check_wrappable(owner, shown, function)
        _registered.entries[id(owner), name] = Registration(owner, name, rule, op)


def _check(owner: Any, name: str, rule: CastPolicy) -> Any:
    if not isinstance(name, str):
        msg = f"{_KINDS[rule]}(module, name): the name of the function must be a string, got {name!r}."
        raise AmpOptionError(msg)
    if isinstance(owner, str):
        msg = f"{_KINDS[rule]} takes the module, not its name {owner!r}: import it, and pass {owner}."
        raise AmpOptionError(msg)
    function = getattr(owner, name, NOTHING)
    if function is NOTHING:
        msg = f"no function named {name} in {shown_as(owner, '')[:-1]}.{near(name, dir(owner))}"
        raise AmpOptionError(msg)
    if not callable(function) or isinstance(function, type):
        kind = "a class" if isinstance(function, type) else f"a {type(function).__name__}"
        msg = f"{shown_as(owner, name)} is {kind}, and functions are registered; name a function or a method."
        raise AmpOptionError(msg)
    return function


def _op(owner: Any, name: str, shown: str, rule: CastPolicy) -> str:
    """Give the name of a function as an op of PyTorch's; empty if it is none."""
    if not any(owner is home for home in _HOMES_OF_OPS) or (owner is nn.functional and name in _COMPOSITES):
        return ""
    try:
        resolve_rules({shown: rule}, "torch")
    except UnknownOpError:
        return ""
    except PolicyError as error:
        msg = f"{_KINDS[rule]}({shown}): {error}"
        raise AmpOptionError(msg) from None
    return shown
