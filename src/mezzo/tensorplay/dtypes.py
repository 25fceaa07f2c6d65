"""Dtypes and kinds of arguments: what autocast has to know of a call's tensors, and asks in every call.

Each look at ``tensor.dtype`` makes a new object and each comparison is a call, so the hot paths ask as little as they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorplay
from tensorplay import Tensor
from tensorplay.nn import Parameter

__all__ = [
    "DTYPE_SETS",
    "FLOAT32",
    "KIND",
    "LOW",
    "OverriddenError",
    "SEQUENCE",
    "SEQUENCES",
    "TENSOR",
    "dtype_name",
    "dtypes_in",
    "eligible_dtypes",
    "float_bits",
    "floats",
    "named_dtype",
    "tensors_in",
]

FLOAT32: Any = tensorplay.float32
LOW: dict[str, Any] = {"bfloat16": tensorplay.bfloat16, "float16": tensorplay.float16}
"""The lower-precision dtypes that a region can compute in."""

SEQUENCES = (list, tuple)
"""What arguments hold tensors in. A tuple: ``list | tuple`` in a function is made anew in every call."""


class OverriddenError(Exception):
    """An argument's class makes calls itself, by ``__tensorplay_function__``, and is to see this one as it came."""


class _Kinds(dict[type, int]):
    """What an argument is, by its type: a tensor, a sequence or neither.

    ``isinstance(3, Tensor)`` takes three times as long as a look into a dictionary, for the class of ``Tensor`` is not
    ``type``. Of types that are not listed nothing is kept.
    """

    def __missing__(self, kind: type) -> int:
        if issubclass(kind, Tensor):
            if hasattr(kind, "__tensorplay_function__"):
                raise OverriddenError
            return TENSOR
        return SEQUENCE if issubclass(kind, SEQUENCES) else 0


TENSOR, SEQUENCE = 1, 2
KIND = _Kinds(
    {Tensor: TENSOR, Parameter: TENSOR, list: SEQUENCE, tuple: SEQUENCE}
    | dict.fromkeys((int, float, bool, str, type(None), tensorplay.DType), 0)
)

_FLOATS = {"float64": tensorplay.float64, "float32": FLOAT32, **LOW}
_NAMES = {dtype: name for name, dtype in _FLOATS.items()}


def dtype_name(dtype: Any) -> str:
    """Name a dtype, as the core does.

    Args:
        dtype: One of TensorPlay's dtypes. Each look at ``tensor.dtype`` makes a new object, so they are compared with
            ``==`` and never with ``is``.

    Returns:
        Such as ``"bfloat16"``.

    Example:
        >>> import tensorplay
        >>> dtype_name(tensorplay.bfloat16)
        'bfloat16'
    """
    return _NAMES.get(dtype) or str(dtype).rpartition(".")[2]


def named_dtype(name: str) -> Any:
    """Give the dtype of a name: float64, float32, bfloat16 or float16."""
    return _FLOATS[name]


def eligible_dtypes(target: Any) -> tuple[Any, ...]:
    """Give the dtypes from which autocast casts to a target: the floating ones of 32 bits and less that are not it.

    They stand in the order in which they are likely to come.
    """
    return tuple(dtype for name, dtype in _FLOATS.items() if name != "float64" and dtype != target)


def tensors_in(value: Any) -> Iterator[Any]:
    """Give the tensors of a call's arguments, in order; lists, tuples and mappings are looked into.

    Args:
        value: An argument, or all of them.

    Yields:
        Tensors.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, SEQUENCES):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def floats(value: Any) -> list[str]:
    """Name the dtypes of the floating tensors among a call's arguments, float64 included.

    Args:
        value: The arguments.

    Returns:
        Dtype names, in order.
    """
    return [name for tensor in tensors_in(value) if (name := _NAMES.get(tensor.dtype)) is not None]


_BITS = {dtype: 1 << index for index, dtype in enumerate(_FLOATS.values())}
DTYPE_SETS = tuple(frozenset(name for index, name in enumerate(_FLOATS) if bits >> index & 1) for bits in range(16))


def dtypes_in(args: Iterable[Any], kwargs: dict[str, Any]) -> frozenset[str]:
    """Name the floating dtypes among a call's arguments, each once, at less cost than `floats`.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.

    Returns:
        Dtype names; always the same object for the same ones.
    """
    bits = float_bits(args)
    return DTYPE_SETS[bits | float_bits(kwargs.values()) if kwargs else bits]


def float_bits(values: Iterable[Any], device: str | None = None) -> int:
    """Tell the floating dtypes among arguments, as the index of a set in `DTYPE_SETS`."""
    bits, last = 0, None
    for value in values:
        kind = KIND[type(value)]
        if kind == TENSOR:
            dtype = value.dtype
            # Most tensors of a call are alike, and comparing is cheaper than looking up.
            if last is not None and dtype == last:
                continue
            if device is None or value.device.type == device:
                last = dtype
                bits |= _BITS.get(dtype, 0)
        elif kind == SEQUENCE:
            bits |= float_bits(value, device)
    return bits
