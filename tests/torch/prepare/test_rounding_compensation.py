"""What rounding cuts off, kept in a second low-precision tensor."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mezzo.torch.masters.rounding import round_stochastic_, split_, widen_

from .rounding_values import LOW, ROUNDING, all_low, bits, low_dtypes, split, values, widened


def error_bound(wide: Tensor, dtype: torch.dtype, seed: int | None) -> Tensor:
    """Give half a step of the remainder: of a number half a step of ``low`` in size, or a whole one with chance."""
    relative = torch.finfo(dtype).eps ** 2 / (8 if seed is None else 4)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    return (wide.double().abs() * relative).clamp(min=smallest)


@given(value=values, dtype=low_dtypes, seed=st.none() | st.integers())
@settings(max_examples=500, deadline=None)
def test_low_and_compensation_stand_for_the_value(value: float, dtype: torch.dtype, seed: int | None) -> None:
    wide = torch.full((8,), value)
    low, compensation = split(wide, dtype, seed)
    together = widened(low, compensation)
    if seed is None:
        assert torch.equal(bits(low), bits(wide.to(dtype)))
    if not math.isfinite(low[0]):
        assert torch.equal(bits(together), bits(low.float()))
        assert (compensation == 0).all()
        return
    assert ((together.double() - wide.double()).abs() <= error_bound(wide, dtype, seed)).all()
    # What could be held is held again.
    assert torch.equal(widened(*split(together, dtype)), together)


@LOW
def test_widening_without_compensation_is_a_plain_conversion(dtype: torch.dtype) -> None:
    every = all_low(dtype)
    assert torch.equal(bits(widened(every, None)), bits(every.float()))


@ROUNDING
def test_a_thousand_small_updates_are_kept_by_a_compensation(seed: int | None) -> None:
    start, update, steps = 1.0, 1e-4, 1000
    low = torch.full((100,), start, dtype=torch.bfloat16)
    wide, plain, compensation = torch.empty(100), low.clone(), torch.zeros_like(low)
    for step in range(steps):
        widen_([wide], [low], [compensation])
        wide += update
        split_([low], [compensation], [wide], seed=seed, count=step)
        plain += update
    assert (plain == start).all()  # 1e-4 is far less than half of bfloat16's step of 2**-7
    # Each splitting is off by 2**-16 at most, half a step of the remainder, and these errors need not cancel out.
    assert ((widened(low, compensation) - (start + steps * update)).abs() <= steps * 2.0**-16).all()


def test_a_thousand_small_updates_are_kept_on_average_by_chance() -> None:
    update, steps, many = 1e-4, 1000, 2000
    low = torch.ones(many, dtype=torch.bfloat16)
    for step in range(steps):
        round_stochastic_([low], [low.float() + update], seed=0, count=step)
    # One rounding has the variance p (1 - p) step**2 with p = update / step, so at most update * step.
    sigma = math.sqrt(steps * update * 2.0**-7 / many)
    assert abs(low.double().mean().item() - (1 + steps * update)) <= 5 * sigma
