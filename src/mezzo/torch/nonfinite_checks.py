"""Whether the numbers of a tensor are finite: a quick look at every result, and an exact one where that is not sure."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mezzo.nonfinite_report import OperandRange
from mezzo.torch.casting import dtype_name
from mezzo.torch.numerics import is_plain
from mezzo.torch.op_facts import is_float
from mezzo.torch.seen_ops import shape_of

__all__ = ["Counted", "count_exactly", "is_finite", "range_of"]


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
    if tensor.dtype.itemsize == 1 or not is_plain(tensor):  # float8 has no sum
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
    if tensor.layout is not torch.strided and tensor.layout is not torch.jagged:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    if not is_plain(tensor):
        return FINITE
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    counts = torch.stack([tensor.isnan().sum(), tensor.isposinf().sum(), tensor.isneginf().sum()])
    return Counted(*(int(number) for number in counts.tolist()))


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
