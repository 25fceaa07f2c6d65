"""The scale moves as `mezzo.LossScaling` says, to the bit, and in int32 and float32."""

from __future__ import annotations

import dataclasses
import math
import pickle
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo import LossScaling, ScaleState, Verdict
from mezzo.errors import ScalingError
from mezzo.jax.double_product import times_in_double
from mezzo.jax.grad_check import GradCheck
from mezzo.jax.scaler import GradScaler
from tests.conformance.scale_sequences import SEQUENCES, ScaleSequence

CHECKS = {
    Verdict.FINITE: GradCheck(jnp.array(False), jnp.array(False)),
    Verdict.INF: GradCheck(jnp.array(True), jnp.array(True)),
    Verdict.NAN: GradCheck(jnp.array(False), jnp.array(True)),
}


@pytest.mark.parametrize("sequence", SEQUENCES, ids=[sequence.name for sequence in SEQUENCES])
def test_the_whole_state_is_that_of_the_core_after_each_verdict(sequence: ScaleSequence) -> None:
    state = sequence.start or sequence.numbers.start()
    scaler = GradScaler.create(sequence.numbers).with_state(state)
    skipped = 0
    for verdict in sequence.verdicts:
        state = sequence.numbers.next(state, verdict)
        scaler = scaler.update(CHECKS[verdict])
        skipped += verdict is not Verdict.FINITE
        assert scaler.state() == state
        assert int(scaler.skipped) == skipped


factors = st.one_of(st.sampled_from([2.0, 3.0, 1.5]), st.floats(1.0, 1e3, exclude_min=True))
backoffs = st.one_of(st.sampled_from([0.5, 0.25, 0.75]), st.floats(1e-3, 1.0, exclude_max=True))
scales = st.floats(2.0**-126, 2.0**127, width=32)


@settings(deadline=None, max_examples=60)
@given(
    scale=scales,
    growth=factors,
    backoff=backoffs,
    interval=st.integers(1, 3),
    floor=scales,
    ceiling=st.one_of(st.none(), scales),
    limit=st.one_of(st.none(), st.integers(0, 3)),
    verdicts=st.lists(st.sampled_from(Verdict), min_size=1, max_size=6),
)
def test_any_numbers_move_the_scale_as_the_core_does_bit_for_bit(
    scale: float,
    growth: float,
    backoff: float,
    interval: int,
    floor: float,
    ceiling: float | None,
    limit: int | None,
    verdicts: list[Verdict],
) -> None:
    if ceiling is not None:
        floor, ceiling = min(floor, ceiling), max(floor, ceiling)
    numbers = LossScaling(scale, growth, backoff, interval, floor, ceiling, limit)
    state, scaler = numbers.start(), GradScaler.create(numbers)
    for verdict in verdicts:
        state, scaler = numbers.next(state, verdict), scaler.update(CHECKS[verdict])
        assert scaler.state() == state


@pytest.mark.parametrize("factor", [0.7, 1.1, 1.001, 1 / 3, 1 + 2.0**-52, 1 - 2.0**-53, 1e-30, 1e30 + 1, 1.5])
def test_a_compiled_product_is_rounded_as_doubles_are(factor: float) -> None:
    bits = np.random.default_rng(0).integers(0x00800000, 0x7F800000, 20_000, dtype=np.uint32)
    scales = bits.view(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        expected = (scales.astype(np.float64) * factor).astype(np.float32)
    got = np.asarray(jax.jit(lambda scale: times_in_double(scale, factor))(scales))
    normal = expected >= 2.0**-126  # below, the floor is taken
    np.testing.assert_array_equal(got[normal], expected[normal])


def test_a_product_between_two_floats_is_rounded_twice_as_the_core_does() -> None:
    """Factors for which the exact product lies next to the middle of two float32 numbers, where rounding once differs."""
    generator = np.random.default_rng(0)
    twice_differs = 0
    for mantissa, target in generator.integers(2**23, 2**24, (40, 2)):
        exact = Fraction(2 * int(target) + 1, 2 * int(mantissa))
        for factor in (float(exact), math.nextafter(float(exact), 9), math.nextafter(float(exact), 0)):
            expected = np.float32(np.float64(mantissa) * factor)
            assert np.asarray(times_in_double(jnp.float32(mantissa), factor)) == expected
            product = Fraction(int(mantissa)) * Fraction(factor)
            twice_differs += product != int(target) + Fraction(1, 2) and np.float64(mantissa) * factor == target + 0.5
    assert twice_differs > 10


@pytest.mark.parametrize("scale", [0.0, 2.0**-130, math.inf, math.nan, -4.0])
def test_a_scale_that_is_no_scale_is_refused_from_a_checkpoint(scale: float) -> None:
    with pytest.raises(ScalingError, match=r"The state has scale .*, with which no gradient survives"):
        GradScaler.create().with_state(ScaleState(scale))


@pytest.mark.parametrize("scale", [math.inf, math.nan, 0.0])
def test_a_scale_that_was_put_in_by_force_stays_what_it_is(scale: float) -> None:
    scaler = dataclasses.replace(GradScaler.create(backoff_factor=0.7), scale=jnp.float32(scale))
    expected = LossScaling(backoff_factor=0.7).next(ScaleState(scale), Verdict.INF).scale
    np.testing.assert_equal(float(scaler.update(False).scale), expected)


def test_a_bool_says_finite_or_inf() -> None:
    scaler = GradScaler.create(init_scale=1024.0)
    for false in (False, jnp.array(False), np.False_):
        assert scaler.update(false).state() == ScaleState(512.0)
    assert scaler.update(True).state() == ScaleState(1024.0, growth_tracker=1)


def test_intervals_that_int32_cannot_hold_are_never_reached() -> None:
    scaler = GradScaler.create(growth_interval=2**40, max_nan_backoffs=2**40)
    scaler = scaler.with_state(ScaleState(4.0, growth_tracker=2**35))
    assert int(scaler.growth_tracker) == 2**31 - 2
    assert float(scaler.update(CHECKS[Verdict.NAN]).scale) == 2.0


def test_the_rule_keeps_the_dtypes_whatever_the_default_dtype_is() -> None:
    dtypes = ["float32", "int32", "int32", "int32"]
    for x64 in (False, True):
        with jax.enable_x64(x64):
            scaler = GradScaler.create(growth_factor=1.1, max_scale=1e5)
            for later in (scaler, scaler.update(True), scaler.update(False), scaler.with_state(scaler.state())):
                leaves: list[Any] = jax.tree.leaves(later)
                assert [str(leaf.dtype) for leaf in leaves] == dtypes
                assert not any(leaf.weak_type for leaf in leaves)


def test_a_scaler_comes_back_from_pickle() -> None:
    scaler = GradScaler.create(init_scale=8.0, min_scale=1.0).update(False)
    back = pickle.loads(pickle.dumps(scaler))
    assert (back.state(), back.scaling, int(back.skipped)) == (ScaleState(4.0), scaler.scaling, 1)


# What cannot be made


def test_numbers_that_cannot_work_are_refused_as_the_core_refuses_them() -> None:
    with pytest.raises(ScalingError, match=r"The growth factor must be > 1\.0"):
        GradScaler.create(growth_factor=1.0)
    with pytest.raises(ScalingError, match="max_scale must not be below min_scale"):
        GradScaler.create(max_scale=1.0, min_scale=2.0)


def test_a_number_with_a_wrong_name_gets_the_right_one_offered() -> None:
    with pytest.raises(ScalingError, match=r"no number 'init_scal'; there are init_scale.*Did you mean 'init_scale'"):
        GradScaler.create(init_scal=2.0)


def test_numbers_come_in_one_of_two_forms() -> None:
    with pytest.raises(ScalingError, match="got scaling and also init_scale"):
        GradScaler.create(LossScaling(), init_scale=4.0)
    with pytest.raises(ScalingError, match=r"scaling must be a mezzo\.LossScaling or None, not 65536\.0"):
        GradScaler.create(65536.0)  # type: ignore[arg-type]
