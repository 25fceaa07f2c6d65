"""`LossScaling` as a value: which numbers it takes, and what holds of every step.

The scales themselves are written out in the table of the conformance tests.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import struct
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo import LossScaling, MezzoError, ScalerProtocolError, ScaleState, ScalingError, SkippedStepsError, Verdict

SMALLEST = 2.0**-126
LARGEST = 3.4028234663852886e38
scales = st.floats(SMALLEST, LARGEST)
numbers_of_runs = st.builds(
    lambda ends, **others: LossScaling(min_scale=min(ends), max_scale=max(ends), **others),
    ends=st.tuples(scales, scales),
    init_scale=scales,
    growth_factor=st.floats(1.0, 1e6, exclude_min=True),
    backoff_factor=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
    growth_interval=st.integers(1, 5),
    max_nan_backoffs=st.none() | st.integers(0, 4),
)
runs = st.lists(st.sampled_from(Verdict), max_size=40)


class Measured:
    """A number as other libraries make them: it only converts."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        return f"Measured({self.value})"


class Pair:
    """As a tensor of two elements: it looks like a number and does not convert."""

    def __float__(self) -> float:
        raise RuntimeError

    def __repr__(self) -> str:
        return "Pair()"


# Numbers


def test_the_defaults_are_pytorchs_with_a_floor_and_a_limit_for_nan() -> None:
    assert dataclasses.asdict(LossScaling()) == {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "min_scale": 2.0**-24,
        "max_scale": None,
        "max_nan_backoffs": 8,
    }


def test_numbers_of_any_kind_are_kept_as_pythons_own() -> None:
    given = LossScaling(1024, Measured(3.0), Fraction(1, 4), 7.0, Measured(2.0), 2**20, Measured(3.0))
    assert given == LossScaling(1024.0, 3.0, 0.25, 7, 2.0, 2.0**20, 3)
    kinds = [type(number) for number in dataclasses.astuple(given)]
    assert kinds == [float, float, float, int, float, float, int]


def test_a_first_scale_is_kept_as_given_and_starts_rounded() -> None:
    numbers = LossScaling(0.1)
    assert numbers.init_scale == 0.1
    assert numbers.start() == ScaleState(0.1)
    assert numbers.start().scale == 0.10000000149011612


SCALE_RULE = "must be finite in float32 and at least 2**-126, or its inverse would not be finite."
GROWTH_RULE = "The growth factor must be > 1.0."
BACKOFF_RULE = "The backoff factor must be < 1.0."
GROWTH_ADVICE = "pass a finite number above 1.0, such as 2.0."
BACKOFF_ADVICE = "pass a number between 0.0 and 1.0, such as 0.5."
LOWEST = "for the lowest floor pass 2.0**-126 (1.1754943508222875e-38)."
NAN_ADVICE = "pass one such as 8, or None to back off for every NaN."
WHOLE = "must be a whole number from"
REFUSED = [
    ({"init_scale": 0}, f"init_scale {SCALE_RULE} Got init_scale=0; pass one such as 65536.0."),
    ({"init_scale": -1.0}, f"init_scale {SCALE_RULE} Got init_scale=-1.0; pass one such as 65536.0."),
    ({"init_scale": 1e-40}, f"init_scale {SCALE_RULE} Got init_scale=1e-40; pass one such as 65536.0."),
    ({"init_scale": 1e39}, f"init_scale {SCALE_RULE} Got init_scale=1e+39; pass one such as 65536.0."),
    ({"init_scale": "1024"}, f"init_scale {SCALE_RULE} Got init_scale='1024'; pass one such as 65536.0."),
    ({"init_scale": None}, f"init_scale {SCALE_RULE} Got init_scale=None; pass one such as 65536.0."),
    ({"init_scale": Pair()}, f"init_scale {SCALE_RULE} Got init_scale=Pair(); pass one such as 65536.0."),
    ({"growth_factor": 1.0}, f"{GROWTH_RULE} Got growth_factor=1.0; {GROWTH_ADVICE}"),
    ({"growth_factor": float("inf")}, f"{GROWTH_RULE} Got growth_factor=inf; {GROWTH_ADVICE}"),
    ({"growth_factor": 10**400}, f"{GROWTH_RULE} Got growth_factor={10**400}; {GROWTH_ADVICE}"),
    ({"backoff_factor": 1}, f"{BACKOFF_RULE} Got backoff_factor=1; {BACKOFF_ADVICE}"),
    ({"backoff_factor": 0.0}, f"The backoff factor must be > 0.0. Got backoff_factor=0.0; {BACKOFF_ADVICE}"),
    ({"backoff_factor": -0.5}, f"The backoff factor must be > 0.0. Got backoff_factor=-0.5; {BACKOFF_ADVICE}"),
    ({"growth_interval": 0}, f"growth_interval {WHOLE} 1 to 2**63 - 1. Got growth_interval=0; pass one such as 2000."),
    (
        {"growth_interval": 2.5},
        f"growth_interval {WHOLE} 1 to 2**63 - 1. Got growth_interval=2.5; pass one such as 2000.",
    ),
    (
        {"growth_interval": 2**63},
        f"growth_interval {WHOLE} 1 to 2**63 - 1. Got growth_interval={2**63}; pass one such as 2000.",
    ),
    ({"min_scale": 0.0}, f"min_scale {SCALE_RULE} Got min_scale=0.0; {LOWEST}"),
    ({"max_scale": float("inf")}, f"max_scale {SCALE_RULE} Got max_scale=inf; pass None for no ceiling."),
    (
        {"max_scale": 1, "min_scale": 2},
        "max_scale must not be below min_scale. Got max_scale=1; min_scale is 2.0, so raise one or lower the other.",
    ),
    (
        {"max_nan_backoffs": -1},
        f"max_nan_backoffs {WHOLE} 0 to 2**63 - 1. Got max_nan_backoffs=-1; {NAN_ADVICE}",
    ),
]


@pytest.mark.parametrize(("given", "text"), REFUSED, ids=[str(given)[:40] for given, _ in REFUSED])
def test_a_number_that_is_not_allowed_is_refused_with_advice(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ScalingError) as caught:
        LossScaling(**given)
    assert str(caught.value) == text


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LossScaling)])
@pytest.mark.parametrize("value", [float("nan"), True, "3", b"3", [3], 3 + 0j], ids=repr)
def test_nan_truth_values_and_what_is_no_number_are_refused_everywhere(name: str, value: object) -> None:
    with pytest.raises(ScalingError, match=name):
        LossScaling(**{name: value})


@pytest.mark.parametrize("name", ["max_scale", "max_nan_backoffs"])
def test_only_a_limit_may_be_none(name: str) -> None:
    assert getattr(LossScaling(**{name: None}), name) is None
    for other in {"init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale"}:
        with pytest.raises(ScalingError, match=f"Got {other}=None;"):
            LossScaling(**{other: None})


def test_the_outermost_numbers_are_allowed() -> None:
    numbers = LossScaling(SMALLEST, 1e300, 1e-300, 2**63 - 1, SMALLEST, LARGEST, 0)
    assert numbers.next(numbers.start(), Verdict.INF).scale == SMALLEST
    assert LossScaling(LARGEST, 1e300, growth_interval=1).next(ScaleState(LARGEST), Verdict.FINITE).scale == LARGEST


def test_the_errors_are_also_what_pytorch_raises() -> None:
    for error, kinds in {
        ScalingError: (MezzoError, ValueError, AssertionError),
        ScalerProtocolError: (MezzoError, RuntimeError, AssertionError),
        SkippedStepsError: (MezzoError, RuntimeError),
    }.items():
        for kind in kinds:
            with pytest.raises(kind, match=r"^why$"):
                raise error("why")


# Steps


@given(numbers_of_runs, runs)
def test_the_scale_keeps_within_its_bounds_or_where_it_started(numbers: LossScaling, verdicts: list[Verdict]) -> None:
    state = numbers.start()
    floor, ceiling = ScaleState(numbers.min_scale).scale, ScaleState(numbers.max_scale).scale
    low, high = min(floor, state.scale), max(ceiling, state.scale)
    for verdict in verdicts:
        before, state = state, numbers.next(state, verdict)
        assert SMALLEST <= low <= state.scale <= high <= LARGEST
        assert struct.unpack("f", struct.pack("f", state.scale)) == (state.scale,)
        assert 0 <= state.growth_tracker < numbers.growth_interval
        if verdict is Verdict.FINITE:
            assert state.scale >= before.scale
            assert state.scale == before.scale or state.growth_tracker == 0
        else:
            assert state.scale <= before.scale
            assert state.growth_tracker == 0


@given(numbers_of_runs, runs)
def test_the_scale_is_backed_off_for_nan_so_often_in_a_row_and_no_more(
    numbers: LossScaling, verdicts: list[Verdict]
) -> None:
    state = numbers.start()
    run = 0
    for verdict in verdicts:
        before, state = state, numbers.next(state, verdict)
        run = run + 1 if verdict is Verdict.NAN else 0
        limit = run if numbers.max_nan_backoffs is None else numbers.max_nan_backoffs
        assert state.nan_backoffs == min(run, limit)
        if run > limit:
            assert state.scale == before.scale
        elif verdict is Verdict.NAN:
            assert state.scale == numbers.next(before, Verdict.INF).scale


@given(numbers_of_runs, runs)
def test_a_step_is_pure(numbers: LossScaling, verdicts: list[Verdict]) -> None:
    state = numbers.start()
    for verdict in verdicts:
        kept = copy.copy(state)
        following = numbers.next(state, verdict)
        assert numbers.next(state, verdict) == following
        assert numbers.next(state, str(verdict)) == following
        assert state == kept
        state = following


@pytest.mark.parametrize("value", ["overflow", "", None, 1, True, ["inf"]])
def test_what_is_no_verdict_is_refused(value: Any) -> None:
    with pytest.raises(ScalingError) as caught:
        LossScaling().next(ScaleState(1.0), value)
    assert str(caught.value) == f"{value!r} is not a verdict; allowed are finite, inf, nan."


@pytest.mark.parametrize("value", [LossScaling(), ScaleState(3.0, 2, 1), Verdict.NAN], ids=repr)
def test_values_are_frozen_and_survive_copies(value: Any) -> None:
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert other == value
        assert hash(other) == hash(value)
    if dataclasses.is_dataclass(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.scale = 1.0


def test_replacing_a_number_checks_it() -> None:
    assert dataclasses.replace(LossScaling(), growth_interval=5) == LossScaling(growth_interval=5)
    with pytest.raises(ScalingError, match=r"^The growth factor must be > 1\.0\."):
        dataclasses.replace(LossScaling(), growth_factor=0.5)


def test_the_scale_of_a_state_may_overflow_float32() -> None:
    """A state says what a checkpoint says; the numbers are what is checked."""
    assert ScaleState(1e39).scale == float("inf")
    assert ScaleState(-1e39).scale == float("-inf")
