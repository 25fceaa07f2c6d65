"""Low-precision values, what they may be rounded from, and `mezzo.torch.masters.rounding` on single tensors."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from mezzo.torch.masters.rounding import round_stochastic_, split_, widen_

LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
ROUNDING = pytest.mark.parametrize("seed", [None, 3], ids=["nearest", "stochastic"])

any_float32 = st.integers(0, 2**32 - 1).map(lambda number: struct.unpack("f", struct.pack("I", number))[0])
near_float16 = st.floats(-70000.0, 70000.0, width=32) | st.floats(-(2.0**-13), 2.0**-13, width=32)
values = any_float32 | near_float16
low_dtypes = st.sampled_from([torch.bfloat16, torch.float16])


def bits(tensor: Tensor) -> Tensor:
    """Give the bits, so that signs of zero and NaN compare too."""
    return tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def all_low(dtype: torch.dtype) -> Tensor:
    """Give all 65536 values of a low dtype, infinities and NaN too."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


FINITE = {
    dtype: (lambda every: every[every.isfinite()].unique())(all_low(dtype).double())
    for dtype in (torch.bfloat16, torch.float16)
}


def neighbours(value: float, dtype: torch.dtype) -> set[float]:
    """Give what a float32 number may become, by looking among all finite low values; the oracle of these tests."""
    nearest = torch.tensor(value).to(dtype).item()
    if not math.isfinite(nearest):
        return {nearest}
    every = FINITE[dtype]
    at = int(torch.searchsorted(every, torch.tensor(value, dtype=torch.float64)))
    if at < len(every) and every[at] == value:
        return {value}
    return {every[place].item() for place in (at - 1, at) if 0 <= place < len(every)}


def stochastic(wide: Tensor, dtype: torch.dtype, seed: int = 0, count: int = 0, skip: Tensor | None = None) -> Tensor:
    low = torch.zeros_like(wide, dtype=dtype)
    round_stochastic_([low], [wide], seed=seed, count=count, skip=skip)
    return low


def split(
    wide: Tensor, dtype: torch.dtype, seed: int | None = None, skip: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    low, compensation = torch.ones_like(wide, dtype=dtype), torch.ones_like(wide, dtype=dtype)
    split_([low], [compensation], [wide], seed=seed, count=5, skip=skip)
    return low, compensation


def widened(low: Tensor, compensation: Tensor | None) -> Tensor:
    wide = torch.full_like(low, math.nan, dtype=torch.float32)
    widen_([wide], [low], None if compensation is None else [compensation])
    return wide


def junk(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Give low values of any bits, NaN with all payloads among them."""
    return torch.randint(-(2**15), 2**15, shape, generator=torch.Generator().manual_seed(3)).to(torch.int16).view(dtype)
