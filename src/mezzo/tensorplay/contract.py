"""Which TensorPlay works: the version, and that each private name which mezzo wraps or calls is there.

TensorPlay has no documented hook through which casts could be inserted, so mezzo relies on names of its extension module.
They are looked at once, when the adapter is imported, so that another release is refused and not half served.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Any

import tensorplay

from mezzo.errors import UnsupportedVersionError

__all__ = ["WORKING", "check_names", "check_version"]

WORKING = "1.0"
"""The series of releases that works."""

_CALLED = {
    "tensorplay._C": (
        "is_autocast_enabled set_autocast_enabled get_autocast_dtype set_autocast_dtype is_autocast_cache_enabled "
        "set_autocast_cache_enabled clear_autocast_cache get_autocast_cpu_dtype get_autocast_gpu_dtype "
        "_transform_is_batched _transform_batch_level _transform_unwrap _transform_make_batched"
    ),
    "tensorplay.Tensor": (
        "to dtype device data requires_grad is_leaf grad_fn _version data_ptr numel detach is_inference numpy __array__ "
        "__dlpack__ shape stride untyped_storage type_as"
    ),
    "tensorplay.nn.modules.rnn": "_check_attributes",
    "tensorplay.utils": "swap_tensors",
    "tensorplay.amp.autocast_mode": "_fused_enter _fused_exit autocast is_autocast_available",
    "tensorplay._C._autograd": "_activation_checkpoint",
    "tensorplay.autograd": "Function is_grad_enabled is_inference_mode_enabled",
}
"""What mezzo calls, beside the ops."""


def check_version(version: str | None = None) -> None:
    """Refuse a release of TensorPlay that mezzo does not know.

    Args:
        version: The release; by default the one that is installed.

    Raises:
        UnsupportedVersionError: It is of another series than the one that works.

    Example:
        >>> check_version("1.0.3")
    """
    found = tensorplay.__version__ if version is None else version
    if ".".join(found.split("+")[0].split(".")[:2]) != WORKING:
        raise UnsupportedVersionError(_message(found, "and mezzo relies on private names of that series"))


def check_names(ops: Iterable[str]) -> None:
    """Refuse a TensorPlay that lacks something which mezzo wraps or calls.

    Args:
        ops: The ops that are to be found at a choke point.

    Raises:
        UnsupportedVersionError: A name is missing; the message says which.
    """
    missing = [
        f"tensorplay._C.{op}" for op in ops if not (hasattr(tensorplay._C, op) or hasattr(tensorplay.Tensor, op))
    ]
    for place, names in _CALLED.items():
        holder = _holder(place)
        missing += [f"{place}.{name}" for name in names.split() if not hasattr(holder, name)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        absent = f"and this one lacks {', '.join(missing[:3])}{more}, on which mezzo relies"
        raise UnsupportedVersionError(_message(_installed(), absent))


def _holder(place: str) -> Any:
    holder: Any = tensorplay
    for part in place.split(".")[1:]:
        holder = getattr(holder, part, None)
    return holder


def _installed() -> str:
    try:
        return importlib.metadata.version("tensorplay")
    except importlib.metadata.PackageNotFoundError:
        return str(tensorplay.__version__)


def _message(found: str, why: str) -> str:
    return (
        f"mezzo.tensorplay works with TensorPlay {WORKING}.*; installed is {found}, {why}. "
        f'Install one that works: pip install "tensorplay=={WORKING}.*"'
    )
