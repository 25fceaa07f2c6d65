"""Casting: which tensors may be cast, to which dtype, and how a cast is made.

The rule is `mezzo.decision`; here it is on PyTorch's own dtypes, fast, since it runs at every call of a listed op. Casts are
made above autograd, so gradients come back in the dtype of the tensor that came in.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Set

import torch
from torch import Tensor

from mezzo.torch.cache import Cast, cast_weight_with

__all__ = ["Cast", "Device", "common_dtype", "device_for", "dtype_name"]

COMPUTED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Eligible dtypes that ops compute in; float8 is for storage."""
_DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
ELIGIBLE = frozenset(dtype for dtype in _DTYPES if dtype.is_floating_point and dtype is not torch.float64)
"""Floating dtypes except float64; complex, integer and boolean tensors are never cast."""

# `Tensor.bfloat16()` is a third faster than `Tensor.to(torch.bfloat16)`, and a cast is most of what a kernel does.
_CASTS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: torch._C.TensorBase.float,
    torch.bfloat16: torch._C.TensorBase.bfloat16,
    torch.float16: torch._C.TensorBase.half,
}

_ON_DEVICE_ATTRIBUTES = {"cpu": "is_cpu", "cuda": "is_cuda", "xpu": "is_xpu", "mps": "is_mps", "mtia": "is_mtia"}


class Device:
    """What casting needs to know about one device type.

    Attributes:
        type: The device type, ``"cpu"``.
        key: Its autocast dispatch key.
        past_key: The keys of lower priority than that one.
        eligible: Says whether a value may be cast: a tensor of an eligible dtype on this device. Like PyTorch, it counts
            mkldnn tensors to the CPU.
        cast: Casts a tensor to a dtype if it is eligible, else returns it as it came.
        cast_weight: The same, reusing the cast made of a weight before in this region; see `mezzo.torch.cache`.
    """

    __slots__ = ("cast", "cast_weight", "eligible", "key", "past_key", "type")

    def __init__(self, device_type: str, key_name: str) -> None:
        self.type = device_type
        # Not every key is an attribute of DispatchKey; parsing its name finds them all.
        self.key = torch._C._dispatch_key_parse(key_name)
        self.past_key = torch._C._dispatch_keyset_full_after(self.key)
        self.cast, self.cast_weight, self.eligible = _casts_on(device_type)


def _casts_on(device_type: str) -> tuple[Cast, Cast, Callable[[object], bool]]:
    # Closures and not methods: these run for every input of every call, and attribute look-ups add up.
    attribute = _ON_DEVICE_ATTRIBUTES.get(device_type)
    on_device: Callable[[Tensor], bool] = (
        operator.attrgetter(attribute) if attribute else lambda tensor: tensor.device.type == device_type
    )

    def eligible(value: object) -> bool:
        return isinstance(value, Tensor) and value.dtype in ELIGIBLE and on_device(value)

    def cast(tensor: Tensor, target: torch.dtype) -> Tensor:
        dtype = tensor.dtype
        if dtype is target or dtype not in ELIGIBLE or not on_device(tensor):
            return tensor
        convert = _CASTS.get(target)
        return convert(tensor) if convert else tensor.to(target)

    return cast, cast_weight_with(cast), eligible


_DEVICES: dict[str, Device] = {}


def device_for(device_type: str) -> Device:
    """Give the casting facts of a device type; one object per type and process.

    Args:
        device_type: A device type that has an autocast dispatch key.
    """
    from mezzo.torch.ops import autocast_key_name  # noqa: PLC0415 - ops needs no casting, casting only this name

    device = _DEVICES.get(device_type)
    if device is None:
        device = _DEVICES.setdefault(device_type, Device(device_type, autocast_key_name(device_type)))
    return device


def common_dtype(dtypes: Set[torch.dtype], low_dtype: torch.dtype) -> torch.dtype:
    """Find the dtype to which ``promote`` casts; `mezzo.decision.widest` on PyTorch's dtypes.

    Args:
        dtypes: The dtypes of the eligible inputs; not empty.
        low_dtype: The region's dtype.

    Returns:
        The widest dtype, float32 where bfloat16 and float16 meet, ``low_dtype`` for float8 alone.
    """
    wide = dtypes & COMPUTED
    if not wide:
        return low_dtype
    return next(iter(wide)) if len(wide) == 1 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Give a dtype's name as the core spells it.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
