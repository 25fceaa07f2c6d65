"""Who casts this op, and why: one action per cast policy, which casts the arguments of a call and makes it.

What each does to dtypes is `mezzo.decision.input_dtypes`, which a test holds them to; here it is written for speed. A call
with ``out=`` is made as it came, as in PyTorch: the caller has chosen the dtype of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorplay
from tensorplay import Tensor

from mezzo.decision import CastPolicy, widest
from mezzo.errors import BannedOpError
from mezzo.tensorplay.casting import cast, hook_for
from mezzo.tensorplay.current import CURRENT, Action
from mezzo.tensorplay.dtypes import (
    DTYPE_SETS,
    FLOAT32,
    KIND,
    LOW,
    SEQUENCE,
    TENSOR,
    dtype_name,
    dtypes_in,
    eligible_dtypes,
    float_bits,
    named_dtype,
)
from mezzo.tensorplay.weight_casts import is_weight

__all__ = ["action_for", "caster", "each", "rebuilt"]

Cast = Callable[[Any], Any]
"""Casts an argument, or leaves it as it is."""


def action_for(rule: CastPolicy, op: str, device: str, low: str) -> Action | None:
    """Give what a cast policy does with the calls of an op.

    Args:
        rule: The cast policy.
        op: The op, for messages.
        device: The device type whose tensors are cast.
        low: The region's dtype, by name.

    Returns:
        An action; None for ``fallthrough``, where a call is made as it came.
    """
    if rule is CastPolicy.LOWER_PRECISION_FP:
        return _casting(caster(LOW[low], device))
    if rule is CastPolicy.FP32:
        return _casting(caster(FLOAT32, device))
    if rule is CastPolicy.PROMOTE:
        return _promoting(device, low)
    if rule in (CastPolicy.BANNED, CastPolicy.BANNED_LOWER_PRECISION):
        return _banned(op, always=rule is CastPolicy.BANNED)
    return None


def caster(target: Any, device: str) -> Cast:
    """Make what casts one argument of a call: an eligible tensor on the device, and those in a list or tuple.

    Args:
        target: The dtype to cast to.
        device: The device type.

    Returns:
        A function of the argument.
    """
    (first, second, *_), label = (*eligible_dtypes(target), target), dtype_name(target)
    hooks = hook_for(first), hook_for(second)
    keeps = target != FLOAT32
    # Asking a tensor for its device costs a third of a cast, and where there is no GPU every tensor is on the CPU.
    elsewhere = device != "cpu" or tensorplay.cuda.is_available()

    def cast_argument(value: Any) -> Any:
        # Tensor's class is not `type`, so that isinstance is quick for it alone.
        if type(value) is Tensor or (kind := KIND[type(value)]) == TENSOR:
            dtype = value.dtype
            if dtype == target:
                return value
            if dtype == first:
                hook = hooks[0]
            elif dtype == second:
                hook = hooks[1]
            else:
                return value
            if elsewhere and value.device.type != device:
                return value
            if keeps and (casts := CURRENT.casts) is not None and is_weight(value):
                return casts.take(value, target, label)
            return cast(value, target, hook)
        if kind == SEQUENCE:
            return rebuilt(value, cast_argument)
        return value

    return cast_argument


def rebuilt(value: Any, change: Cast) -> Any:
    """Change the tensors in a list or tuple, a named tuple included; one without any, such as a shape, is left as it is."""
    for item in value:
        if KIND[type(item)]:
            break
    else:
        return value
    items = [change(item) for item in value]
    if type(value) is list:
        return items
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def each(change: Cast, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Change every argument of a call."""
    cast_args = [change(value) for value in args]
    return cast_args, {name: change(value) for name, value in kwargs.items()} if kwargs else kwargs


def _casting(cast_argument: Cast) -> Action:
    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs:
            return function(*[cast_argument(value) for value in args])
        if kwargs.get("out") is not None:
            return function(*args, **kwargs)
        return function(
            *[cast_argument(value) for value in args], **{name: cast_argument(value) for name, value in kwargs.items()}
        )

    return act


def _promoting(device: str, low: str) -> Action:
    casters = {name: caster(named_dtype(name), device) for name in ("float32", *LOW)}
    # Where all tensors have one dtype there is nothing to cast.
    chosen = [
        casters[name] if len(found) > 1 and (name := widest(sorted(found), low)) is not None else None
        for found in DTYPE_SETS
    ]

    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bits = float_bits(args, device)
        if kwargs:
            bits |= float_bits(kwargs.values(), device)
        cast_argument = chosen[bits]
        if cast_argument is None or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        args_cast, kwargs_cast = each(cast_argument, args, kwargs)
        return function(*args_cast, **kwargs_cast)

    return act


def _banned(op: str, *, always: bool) -> Action:
    advice = {
        "binary_cross_entropy": (
            " The logarithm of a probability near 0 or 1 overflows in lower precision; use "
            "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which are safe, and leave out the sigmoid."
        )
    }.get(op, "")

    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if always or not LOW.keys().isdisjoint(dtypes_in(args, kwargs)):
            when = "" if always else " for inputs in lower precision"
            msg = (
                f"{op} is banned{when} by the policy of this region.{advice} To allow it, override the rule, such as "
                f"policy.override({{{op!r}: 'fp32'}}), or run it in autocast(..., enabled=False)."
            )
            raise BannedOpError(msg)
        return function(*args, **kwargs)

    return act
