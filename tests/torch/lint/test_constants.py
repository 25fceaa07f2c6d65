"""What becomes of a constant in a lower precision, against PyTorch's casts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.torch.linting.constants import becomes_infinite, becomes_one, largest, rounded, smallest, vanishes

DTYPES = ("float16", "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@given(value=st.floats(width=32, allow_nan=False))
def test_rounding_is_that_of_a_cast(dtype: str, value: float) -> None:
    low = getattr(torch, dtype)
    assert rounded(value, dtype) == torch.tensor(value, dtype=torch.float32).to(low).item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_that_of_a_cast_at_every_bound(dtype: str) -> None:
    low = getattr(torch, dtype)
    info = torch.finfo(low)
    above = math.ldexp(1.0, math.frexp(info.max)[1])  # the first power of two that is too large
    edges = [info.max, (info.max + above) / 2, info.tiny, smallest(dtype), smallest(dtype) / 2, 1 - info.eps / 4, 1.0]
    for edge in edges:
        values = torch.tensor([edge, math.nextafter(edge, 0), math.nextafter(edge, math.inf)], dtype=torch.float64)
        values = values.float()  # a cast from float64 may go by way of float32
        assert [rounded(value, dtype) for value in values.tolist()] == values.to(low).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bounds_are_those_of_the_dtype(dtype: str) -> None:
    info = torch.finfo(getattr(torch, dtype))
    assert (largest(dtype), smallest(dtype)) == (info.max, info.smallest_normal * info.eps)


def test_half_of_the_smallest_float16_vanishes_and_a_little_more_does_not() -> None:
    assert vanishes(2.0**-25, "float16")
    assert not vanishes(math.nextafter(2.0**-25, 1), "float16")
    assert not vanishes(0.0, "float16")


def test_float16_ends_half_a_step_above_its_largest_number() -> None:
    assert becomes_infinite(65520.0, "float16")
    assert not becomes_infinite(math.nextafter(65520.0, 0), "float16")
    assert not becomes_infinite(math.inf, "float16")


def test_float32s_smallest_is_infinite_in_bfloat16_too() -> None:
    assert becomes_infinite(torch.finfo(torch.float32).min, "bfloat16")
    assert not becomes_infinite(torch.finfo(torch.bfloat16).min, "bfloat16")


def test_only_a_number_below_one_becomes_one() -> None:
    assert becomes_one(1 - 2.0**-12, "float16")
    assert not becomes_one(1 - 2.0**-11, "float16")
    assert not becomes_one(1.0, "float16")
    assert not becomes_one(1 + 2.0**-20, "float16")
