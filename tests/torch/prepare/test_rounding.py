"""Rounding of float32 values to bfloat16 and float16, to nearest and stochastically: which values come out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mezzo.errors import DtypeError
from mezzo.torch.masters.rounding import generator_for, may_come_from, round_nearest_, round_stochastic_, split_, widen_

from .rounding_values import FINITE, LOW, all_low, bits, low_dtypes, neighbours, stochastic, values

# To nearest


@LOW
def test_rounding_to_nearest_is_what_to_gives_bit_for_bit(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    wide = torch.randint(-(2**31), 2**31, (200_000,), generator=random).to(torch.int32).view(torch.float32)
    many = [wide, wide[:7], wide[:0], wide[5], wide[: 64 * 3].view(64, 3).t()]
    low = [torch.zeros_like(one, dtype=dtype) for one in many]
    round_nearest_(low, many)
    for rounded, one in zip(low, many, strict=True):
        assert torch.equal(bits(rounded), bits(one.to(dtype)))


def test_rounding_no_tensors_is_nothing() -> None:
    round_nearest_([], [])
    round_stochastic_([], [], seed=0, count=0)
    widen_([], [], [])
    split_([], [], [])


# Stochastically: what may come out


@LOW
def test_values_of_the_low_dtype_stay_themselves(dtype: torch.dtype) -> None:
    every = all_low(dtype).float()
    for count in range(3):
        # All NaN become the one that PyTorch makes.
        assert torch.equal(bits(stochastic(every, dtype, count=count)), bits(every.to(dtype)))


@LOW
def test_a_value_of_the_low_dtype_stays_whatever_is_drawn(dtype: torch.dtype) -> None:
    count = 173  # this call draws a 0, which is below any probability but 0
    draws = torch.empty(2**14).random_(0, 2**24, generator=generator_for(torch.device("cpu"), 0, count))
    assert (draws == 0).any()
    assert (stochastic(torch.ones(2**14), dtype, seed=0, count=count) == 1).all()


@given(value=values, dtype=low_dtypes, seed=st.integers(), count=st.integers(0, 2**40))
@settings(max_examples=500, deadline=None)
def test_stochastic_rounding_gives_a_neighbour_with_the_sign_of_the_value(
    value: float, dtype: torch.dtype, seed: int, count: int
) -> None:
    wide = torch.full((64,), value)
    rounded = stochastic(wide, dtype, seed, count)
    if math.isnan(value):
        assert rounded.isnan().all()
        return
    assert set(rounded.tolist()) <= neighbours(value, dtype)
    assert torch.equal(rounded.signbit(), wide.signbit())
    assert may_come_from(rounded, wide).all()


@LOW
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_above_the_largest_finite_value_rounding_is_to_nearest(dtype: torch.dtype, sign: float) -> None:
    before, largest = FINITE[dtype][-2:].tolist()
    limit = torch.full((10_000,), largest + (largest - before) / 2)
    below = torch.nextafter(limit, torch.zeros_like(limit))
    assert (stochastic(sign * below, dtype) == sign * largest).all()
    assert (stochastic(sign * limit, dtype) == sign * math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float8_e4m3fn])
def test_stochastic_rounding_to_another_dtype_is_an_error(dtype: torch.dtype) -> None:
    low = torch.zeros(3).to(dtype)
    with pytest.raises(DtypeError, match=r"to torch.bfloat16 or torch.float16, got a tensor of torch.float"):
        round_stochastic_([low], [torch.ones(3)], seed=0, count=0)
    with pytest.raises(DtypeError, match=r"got a tensor of torch.float.*leave it out"):
        may_come_from(low, torch.ones(3))


# Stochastically: how often

DRAWS = 2**18


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
@pytest.mark.parametrize("share", [2.0**-10, 0.25, 0.5, 0.7, 1 - 2.0**-10])
@pytest.mark.parametrize(
    ("dtype", "low", "step"),
    [
        (torch.bfloat16, 1.0, 2.0**-7),
        (torch.bfloat16, 1.9921875, 2.0**-7),  # the next one is a power of 2
        (torch.bfloat16, 0.0, 2.0**-133),
        (torch.bfloat16, 2.0**-130, 2.0**-133),
        (torch.bfloat16, 2.0**-126 - 2.0**-133, 2.0**-133),  # from the last subnormal to the first normal number
        (torch.float16, 1.0, 2.0**-10),
        (torch.float16, 0.0, 2.0**-24),
        (torch.float16, 2.0**-20, 2.0**-24),
        (torch.float16, 2.0**-14 - 2.0**-24, 2.0**-24),
        (torch.float16, 65472.0, 32.0),
    ],
)
def test_the_neighbours_come_as_often_as_the_value_is_near_them(
    dtype: torch.dtype, low: float, step: float, share: float, sign: float
) -> None:
    wide = torch.full((DRAWS,), sign * (low + share * step))
    exact = (abs(wide[0].double().item()) - low) / step  # of the float32 number, which may not have all bits of `share`
    rounded = stochastic(wide, dtype, seed=17)
    assert set(rounded.double().tolist()) == {sign * low, sign * (low + step)}
    ups = int((rounded.double().abs() > low).sum())
    # A binomial count is within 5 standard deviations of its mean but once in 1.7 million.
    assert abs(ups - DRAWS * exact) <= 5 * math.sqrt(DRAWS * exact * (1 - exact))


@LOW
def test_the_mean_of_rounded_values_is_the_mean_of_the_values(dtype: torch.dtype) -> None:
    wide = torch.randn(2**20, generator=torch.Generator().manual_seed(2))
    error = stochastic(wide, dtype).double() - wide.double()
    # Each error's variance is p (1 - p) step**2, at most a quarter of the squared step.
    step = torch.finfo(dtype).eps * 2.0 ** wide.double().abs().log2().floor()
    assert error.sum().abs() <= 5 * math.sqrt((step**2 / 4).sum().item())
    assert error.abs().max() > step.min()


# Stochastically: where the numbers come from

halves = torch.full((20_000,), 1 + 2.0**-8)
"""Each is rounded up or down with the probability 1/2."""


def are_independent(one: Tensor, other: Tensor) -> bool:
    """Say whether two roundings of `halves` agree in half of the places, within 5 standard deviations."""
    same = int((one == other).sum())
    return abs(same - len(halves) / 2) <= 5 * math.sqrt(len(halves) / 4)


def test_the_same_seed_and_count_give_the_same_bits() -> None:
    again = [stochastic(halves, torch.bfloat16, seed=-5, count=9) for _ in range(2)]
    assert torch.equal(*again)


@pytest.mark.parametrize(("seed", "count"), [(0, 1), (1, 0), (0, 2**31), (2**70, 0), (-1, 0)])
def test_another_seed_or_count_gives_other_numbers(seed: int, count: int) -> None:
    first = stochastic(halves, torch.bfloat16, seed=0, count=0)
    assert are_independent(first, stochastic(halves, torch.bfloat16, seed=seed, count=count))


def test_tensors_of_one_call_get_different_numbers() -> None:
    low = [torch.zeros_like(halves, dtype=torch.bfloat16) for _ in range(3)]
    round_stochastic_(low, [halves] * 3, seed=0, count=0)
    assert are_independent(low[0], low[1])
    assert are_independent(low[1], low[2])
    assert are_independent(low[0], low[2])
    assert are_independent(low[0][:-1], low[0][1:])


@LOW
def test_a_list_rounded_in_pieces_by_one_generator_gets_the_bits_of_one_call(dtype: torch.dtype) -> None:
    wide = [torch.randn(2**17 + 11), torch.randn(5), torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)]
    whole = [torch.zeros_like(one, dtype=dtype) for one in wide]
    round_stochastic_(whole, wide, seed=2, count=7)
    flat = torch.cat([wide[0], wide[1], wide[2].permute(0, 2, 3, 1).reshape(-1)])
    low, lacking, again = torch.zeros(3, len(flat), dtype=dtype)
    generators = [generator_for(torch.device("cpu"), 2, 7) for _ in range(2)]
    for piece in [slice(0, 1000), slice(1000, 2**17 + 13), slice(2**17 + 13, len(flat))]:
        round_stochastic_([low[piece]], [flat[piece]], seed=generators[0])
        split_([again[piece]], [lacking[piece]], [flat[piece]], seed=generators[1])
    expected = torch.cat([whole[0], whole[1], whole[2].permute(0, 2, 3, 1).reshape(-1)])
    assert torch.equal(low, expected)
    assert torch.equal(again, expected)


def test_no_two_blocks_of_a_tensor_get_the_same_numbers() -> None:
    rounded = stochastic(torch.full((2**17,), halves[0].item()), torch.bfloat16)
    assert are_independent(rounded[: len(halves)], rounded[2**16 :][: len(halves)])


def test_the_global_generator_is_neither_asked_nor_changed() -> None:
    torch.manual_seed(1)
    first, state = stochastic(halves, torch.bfloat16), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(stochastic(halves, torch.bfloat16), first)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(2).get_state())
    assert torch.equal(state, torch.Generator().manual_seed(1).get_state())


# What may have been rounded


@given(value=values, dtype=low_dtypes)
@example(value=math.nan, dtype=torch.bfloat16)
@example(value=math.nan, dtype=torch.float16)
@example(value=3.39e38, dtype=torch.bfloat16)  # between the largest finite value and what rounds to infinity
@example(value=65510.0, dtype=torch.float16)
@settings(max_examples=300, deadline=None)
def test_only_neighbours_may_come_from_a_value(value: float, dtype: torch.dtype) -> None:
    every = all_low(dtype)
    found = every[may_come_from(every, torch.full_like(every, value, dtype=torch.float32))]
    if math.isnan(value):
        assert torch.equal(bits(found), bits(every[every.isnan()]))
    else:
        assert set(found.tolist()) == neighbours(value, dtype)
