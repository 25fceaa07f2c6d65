"""Calling a function that PyTorch does not list as PyTorch calls the ops that it does: tensors cast, autocast off inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mezzo.builtin import builtin_policy
from mezzo.decision import CastPolicy
from mezzo.errors import BannedOpError
from mezzo.torch.active import slot_for
from mezzo.torch.casting import ELIGIBLE, common_dtype, device_for
from mezzo.torch.trees import map_tensors, tensors_in

__all__ = ["call_with_casts"]

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]

_FP32 = builtin_policy("fp32")


def call_with_casts(
    name: str, rule: CastPolicy, function: Callable[..., Any], args: Arguments, kwargs: Keywords
) -> Any:
    """Call a function as its cast policy says, on the devices of its tensors that have an enabled region.

    Args:
        name: What it is called in messages.
        rule: ``lower_precision_fp``, ``fp32``, ``promote`` or ``banned``.
        function: The function.
        args: Its arguments; tensors in any pytree are cast.
        kwargs: Its keyword arguments.

    Returns:
        What the function returns.

    Raises:
        BannedOpError: The rule is ``banned``, and there is such a device.
    """
    tensors = tensors_in((args, kwargs))
    devices = [device for device in sorted({tensor.device.type for tensor in tensors}) if _has_region(device)]
    if not devices:
        return function(*args, **kwargs)
    if rule is CastPolicy.BANNED:
        msg = (
            f"{name} is banned in autocast regions. Call it in a region with enabled=False, or register it with another "
            "cast policy."
        )
        raise BannedOpError(msg)
    dtypes = {tensor.dtype for tensor in tensors if tensor.dtype in ELIGIBLE and tensor.device.type in devices}
    targets = {device: _target(rule, dtypes, device) for device in devices} if dtypes else {}

    def cast(tensor: Tensor) -> Tensor:
        target = targets.get(tensor.device.type)
        return tensor if target is None or tensor.dtype not in ELIGIBLE else _cast(tensor, target, rule)

    args = tuple(map_tensors(cast, value) for value in args)
    kwargs = {name: map_tensors(cast, value) for name, value in kwargs.items()}
    return _call_with_autocast_off(devices, function, args, kwargs)


def _has_region(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _target(rule: CastPolicy, dtypes: set[torch.dtype], device_type: str) -> torch.dtype:
    low_dtype = torch.get_autocast_dtype(device_type)
    if rule is CastPolicy.FP32 or _rules_fp32(device_type):
        return torch.float32
    return low_dtype if rule is CastPolicy.LOWER_PRECISION_FP else common_dtype(dtypes, low_dtype)


def _rules_fp32(device_type: str) -> bool:
    return slot_for(device_type).current().policy == _FP32


# As torch.compiler.assume_constant_result does, which imports Dynamo. While code is traced, what is in force is known.
_rules_fp32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _cast(tensor: Tensor, target: torch.dtype, rule: CastPolicy) -> Tensor:
    if torch.compiler.is_compiling():
        return tensor.to(target)
    device = device_for(tensor.device.type)
    # As for the ops that PyTorch lists: a weight is cast to the low dtype once per region.
    return (device.cast_weight if rule is CastPolicy.LOWER_PRECISION_FP else device.cast)(tensor, target)


def _call_with_autocast_off(devices: list[str], function: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    if not devices:
        return function(*args, **kwargs)
    # PyTorch's own region: a disabled one needs no policy, and torch.compile knows it.
    with torch.autocast(devices[0], enabled=False):
        return _call_with_autocast_off(devices[1:], function, args, kwargs)
