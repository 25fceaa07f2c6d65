"""The numbers of a tensor, sorted by size and counted exactly.

Absolute values of floating-point numbers are in the order of their bits. So the upper 15 bits after the sign, which are all
there is of a float16 or bfloat16, sort the numbers into 32768 bins, and one histogram tells nearly everything. What a cast
to float16 or bfloat16 does to a bin is asked of real casts, once for each dtype. A float32 has 16 bits below; of the few
bins that a threshold goes through, the numbers themselves are cast.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.report.numbers import Loss, Numbers

__all__ = ["TARGETS", "numbers_of", "numbers_of_float64"]

TARGETS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""The dtypes whose losses are counted."""

_BINS = 1 << 15
_CODES = 4
_FINE, _OVERFLOW, _UNDERFLOW, _SUBNORMAL = range(_CODES)
_LOSSES = (_OVERFLOW, _UNDERFLOW, _SUBNORMAL)


@dataclass(frozen=True)
class _Table:
    """What is known of the bins of a dtype: for each, its exponent, and what the casts to both targets do to it."""

    exponents: Tensor
    casts: Tensor
    mixed: Tensor
    first_inf: int


@functools.cache
def _table(dtype: torch.dtype) -> _Table:
    bins = torch.arange(_BINS, dtype=torch.int32)
    if dtype is torch.float32:
        low, high = (bins << 16).view(dtype), ((bins << 16) | 0xFFFF).view(dtype)
    else:
        low = high = bins.to(torch.int16).view(dtype)
    first, last = _effects(low), _effects(high)
    return _Table(torch.frexp(high.double()).exponent - 1, first, first != last, int(torch.isinf(low).nonzero()[0]))


def _effects(numbers: Tensor) -> Tensor:
    """Say for each number what both casts do to it, as one code."""
    first, second = (_effect(numbers, target) for target in TARGETS.values())
    return first * _CODES + second


def _effect(numbers: Tensor, target: torch.dtype) -> Tensor:
    low = numbers.to(target).double().abs()
    code = torch.full(numbers.shape, _FINE)
    code[(low > 0) & (low < torch.finfo(target).tiny)] = _SUBNORMAL
    code[(low == 0) & (numbers != 0)] = _UNDERFLOW
    code[torch.isinf(low) & torch.isfinite(numbers)] = _OVERFLOW
    return code


class _Bins:
    """The finite numbers of a tensor of float16, bfloat16 or float32 other than 0: which bins hold some, and how many.

    Of float32, some are taken out of their bins and looked at one by one: those in bins that a threshold goes through, and
    the smallest, which share a bin with the zeros.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.table = _table(tensor.dtype)
        self.flat = tensor.reshape(-1)
        exact = tensor.dtype is not torch.float32
        halves = self.flat.view(torch.int16)
        # Every machine that PyTorch runs on has the upper half of a float32 second.
        self.keys = (halves if exact else halves[1::2]) & 0x7FFF
        counts = torch.bincount(self.keys).cpu()
        bins = counts.nonzero().reshape(-1)
        finite = bins < self.table.first_inf
        self.nonfinite = int(counts[self.table.first_inf :].sum())
        self.inf = int(torch.isinf(self.flat).sum()) if self.nonfinite else 0
        self.bins = bins[finite & (bins > 0)]
        self.counts = counts[self.bins]
        self.single = torch.empty(0)
        self.smallest = self.largest = 0.0
        if exact and len(self.bins):
            self.smallest, self.largest = map(float, self.bins[[0, -1]].to(torch.int16).view(tensor.dtype))
        if not exact:
            self._look_closer(int(counts[0]) if len(counts) else 0)

    def __len__(self) -> int:
        return int(self.counts.sum()) + len(self.single)

    def _look_closer(self, in_bin_0: int) -> None:
        """Find the extremes of float32 numbers, and take out those that a bin says too little about."""
        zeros = self.flat.numel() - int(torch.count_nonzero(self.flat)) if in_bin_0 else 0
        mixed = self.table.mixed[self.bins]
        wanted = {*self.bins[mixed].tolist(), *self.bins[:1].tolist()}
        if in_bin_0 > zeros:
            wanted.add(0)
        if self.nonfinite:
            wanted.update(self.bins[-1:].tolist())
        numbers = _taken(self.flat, self.keys, sorted(wanted))
        self.single = numbers[self.table.mixed[numbers.view(torch.int32) >> 16]]
        self.bins, self.counts = self.bins[~mixed], self.counts[~mixed]
        if len(numbers):
            # Without Inf and NaN the bin of the largest need not be looked for.
            edges = torch.aminmax(numbers if self.nonfinite else self.flat)
            self.smallest, self.largest = float(numbers.min()), max(abs(float(edge)) for edge in edges)

    def exponents(self) -> dict[int, int]:
        """Count the numbers by exponent."""
        return _by_exponent(self.table.exponents[self.bins], self.counts, self.single)

    def losses(self) -> dict[str, list[int]]:
        """Count for each target the numbers that overflow, underflow and become subnormal."""
        sums = torch.zeros(_CODES * _CODES, dtype=torch.int64).index_add_(0, self.table.casts[self.bins], self.counts)
        if len(self.single):
            sums += torch.bincount(_effects(self.single), minlength=len(sums))
        table = sums.view(_CODES, _CODES)
        return {target: table.sum(1 - place)[list(_LOSSES)].tolist() for place, target in enumerate(TARGETS)}


def _taken(flat: Tensor, keys: Tensor, wanted: list[int]) -> Tensor:
    """Give the absolute values of the numbers in some bins, zeros left out, on the CPU."""
    if not wanted:
        return torch.empty(0)
    mask = keys == wanted[0]
    for key in wanted[1:]:
        mask |= keys == key
    # Mostly there are few: eight at once are asked whether one of them is.
    whole = len(mask) - len(mask) % 8
    hit = mask[:whole].view(torch.int64).nonzero().reshape(-1)
    found = flat[:whole].view(-1, 8)[hit][mask[:whole].view(-1, 8)[hit]]
    numbers = torch.cat([found, flat[whole:][mask[whole:]]]).cpu().abs()
    return numbers[numbers != 0] if wanted[0] == 0 else numbers


def _by_exponent(exponents: Tensor, counts: Tensor, single: Tensor) -> dict[int, int]:
    # float64 has them from -1074 to 1023.
    sums = torch.zeros(2100, dtype=torch.int64).index_add_(0, exponents.long() + 1074, counts)
    if single.numel():
        sums += torch.bincount(torch.frexp(single.double()).exponent.cpu() + 1073, minlength=len(sums))
    present = sums.nonzero().reshape(-1)
    return dict(zip((present - 1074).tolist(), sums[present].tolist(), strict=True))


def numbers_of(tensor: Tensor) -> Numbers:
    """Count the numbers of a contiguous tensor of float16, bfloat16 or float32, of any shape."""
    elements = tensor.numel()
    found = _Bins(tensor)
    return Numbers(
        elements=elements,
        max_abs=found.largest,
        min_abs=found.smallest,
        nan=found.nonfinite - found.inf,
        inf=found.inf,
        losses={target: _shares(counts, elements) for target, counts in found.losses().items()},
        exponents=found.exponents(),
    )


def numbers_of_float64(tensor: Tensor) -> Numbers:
    """Count the numbers of a contiguous float64 tensor.

    PyTorch's own casts to 16 bits go by float32, so what is lost there is lost.
    """
    elements = tensor.numel()
    inf = int(torch.isinf(tensor).sum())
    finite = tensor[torch.isfinite(tensor)].abs()
    numbers = finite[finite != 0]
    narrow = _Bins(numbers.float())
    gone = numbers.numel() - narrow.nonfinite - len(narrow)
    losses = {
        target: _shares([high + narrow.inf, low + gone, subnormal], elements)
        for target, (high, low, subnormal) in narrow.losses().items()
    }
    none = torch.empty(0, dtype=torch.int64)
    return Numbers(
        elements=elements,
        max_abs=float(numbers.max()) if numbers.numel() else 0.0,
        min_abs=float(numbers.min()) if numbers.numel() else 0.0,
        nan=elements - inf - finite.numel(),
        inf=inf,
        losses=losses,
        exponents=_by_exponent(none, none, numbers),
    )


def _shares(counts: list[int], elements: int) -> Loss:
    return Loss(*(count / elements if elements else 0.0 for count in counts))
