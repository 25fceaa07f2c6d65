"""Whether the numbers of a tensor are finite: a quick look at every result, and an exact one where that is not sure."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mezzo.report.nonfinite import OperandRange
from mezzo.torch.casting import dtype_name
from mezzo.torch.recording.numerics import is_plain
from mezzo.torch.recording.op_facts import is_float
from mezzo.torch.recording.seen_ops import shape_of

__all__ = ["FINITE", "Counted", "can_be_looked_at", "count_exactly", "is_finite", "range_of"]


class Counted(NamedTuple):
    """How many numbers of a tensor are not finite.

    Attributes:
        nan: NaN.
        inf: Inf.
        minus_inf: -Inf.
    """

    nan: int = 0
    inf: int = 0
    minus_inf: int = 0

    @property
    def any(self) -> bool:
        """Whether any is not."""
        return bool(self.nan or self.inf or self.minus_inf)

    @property
    def kind(self) -> str:
        """The worst of them, by name."""
        return "NaN" if self.nan else "Inf" if self.inf else "-Inf"


FINITE = Counted()


def is_finite(tensor: Tensor) -> bool:
    """Say whether all numbers of a floating-point or complex tensor are finite. Reads the device.

    The sum of numbers is not finite if one of them is not. It takes a pass over the memory and nothing else, a tenth of what
    ``isfinite().all()`` takes; where it has overflowed by itself, which happens in float16, the numbers are counted.

    Args:
        tensor: Any tensor; of a kind that cannot be looked at it is said to be.
    """
    if tensor.dtype.itemsize == 1 or tensor.dtype is torch.complex32 or not is_plain(tensor):  # these have no sum
        return not count_exactly(tensor).any
    total = tensor.sum().item()
    return bool(total - total == 0) or not count_exactly(tensor).any


def count_exactly(tensor: Tensor) -> Counted:
    """Count what is not finite. Reads the device.

    Args:
        tensor: Any tensor; of a kind that cannot be looked at nothing is counted.
    """
    if not is_float(tensor.dtype):
        return FINITE
    parts = _parts(tensor)
    if parts is None:
        return FINITE
    if len(parts) != 1 or parts[0] is not tensor:
        counts = [count_exactly(part) for part in parts]
        return Counted(*(sum(numbers) for numbers in zip(*counts, strict=True))) if counts else FINITE
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    numbers = torch.stack([tensor.isnan().sum(), tensor.isposinf().sum(), tensor.isneginf().sum()])
    return Counted(*(int(number) for number in numbers.tolist()))


def can_be_looked_at(tensor: Tensor) -> bool:
    """Say whether a tensor has numbers that can be read: fake tensors, tracers' and strange layouts have none."""
    return is_plain(tensor) or _parts(tensor) is not None


def _parts(tensor: Tensor) -> list[Tensor] | None:
    """Give the plain tensors that a tensor is made of, itself if it is plain; None if they are not known."""
    if is_plain(tensor):
        return [tensor]
    if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
        if tensor.layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            return _parts(tensor._values() if tensor.layout is torch.sparse_coo else tensor.values())
        bare = (
            tensor.resolve_conj().resolve_neg() if tensor.layout is torch.strided and not tensor.is_nested else tensor
        )
        return [bare] if is_plain(bare) else None
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    names = ["_local_tensor"] if hasattr(tensor, "_local_tensor") else flatten()[0]
    found = [_parts(getattr(tensor, name)) for name in names]
    return None if any(each is None for each in found) else [one for each in found for one in each or ()]


def range_of(tensor: Tensor, name: str = "") -> OperandRange:
    """Give the range of a tensor's numbers. Reads the device.

    Args:
        tensor: A floating-point or complex tensor; of complex numbers it is that of both parts.
        name: What it is called.
    """
    dtype, shape = dtype_name(tensor.dtype), shape_of(tensor)
    if not is_plain(tensor):
        return OperandRange(dtype, shape, None, None, name=name)
    counted = count_exactly(tensor)
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    finite = real[real.isfinite()] if real.dtype.itemsize > 1 else real.float()[real.float().isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (None, None)
    return OperandRange(dtype, shape, low, high, counted.nan, counted.inf + counted.minus_inf, name)
