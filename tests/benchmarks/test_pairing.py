"""The statistics of paired timings, on numbers whose answer is known."""

from __future__ import annotations

import random

import pytest
from benchmarks.pairing import (
    SIDES,
    Estimate,
    Round,
    compare,
    estimate,
    is_control_narrow,
    judge,
    next_iterations,
    turns,
)


def test_turns_alternate_with_torch_between_the_others():
    orders = [turns(index) for index in range(4)]
    assert orders[0] == orders[2] == SIDES
    assert orders[1] == orders[3] == SIDES[::-1]
    assert all(order[1] == "torch" for order in orders)


@pytest.mark.parametrize(
    ("seconds", "iterations", "target", "expected"),
    [
        (0.01, 1, 0.1, 10),
        (0.2, 10, 0.1, 5),
        (3.0, 1, 0.1, 1),
        (1e-6, 1, 0.1, 100),
        (0.0, 3, 0.1, 300),
    ],
)
def test_next_iterations_aims_at_the_target_and_grows_at_most_a_hundredfold(seconds, iterations, target, expected):
    assert next_iterations(seconds, iterations, target) == expected


def test_compare_pairs_within_a_round():
    rounds = [Round(mezzo=3.0, torch=2.0, control=2.5), Round(mezzo=30.0, torch=20.0, control=10.0)]
    assert compare(rounds, "ratio", "mezzo") == [1.5, 1.5]
    assert compare(rounds, "difference", "mezzo") == [1.0, 10.0]
    assert compare(rounds, "ratio", "control") == [1.25, 0.5]


def test_a_machine_that_slows_down_for_all_sides_leaves_the_ratio_alone():
    speeds = [1.0, 1.1, 2.5, 2.4, 0.9]
    rounds = [Round(mezzo=1.05 * speed, torch=speed, control=speed) for speed in speeds]
    measured = estimate([compare(rounds, "ratio", "mezzo")])
    assert measured.low == pytest.approx(1.05)
    assert measured.median == pytest.approx(1.05)
    assert measured.high == pytest.approx(1.05)


def test_one_disturbed_round_does_not_move_the_median():
    values = [1.00, 1.01, 0.99, 1.00, 1.02, 0.98, 1.00, 25.0, 1.01]
    measured = estimate([values])
    assert measured.median == 1.00
    assert measured.high <= 1.02


def test_the_interval_is_reproducible():
    values = [random.Random(1).gauss(1.0, 0.1) for _ in range(20)]
    assert estimate([values]) == estimate([values])


def test_the_interval_holds_the_true_median_about_as_often_as_it_says():
    """95% nominally; 160 seeded experiments of 40 values, at least 90% of which must hold it."""
    source = random.Random(0)
    held = 0
    for _ in range(160):
        values = [source.gauss(1.0, 0.05) for _ in range(40)]
        measured = estimate([values], resamples=200)
        held += measured.low <= 1.0 <= measured.high
    assert held >= 144
    assert held < 160


def test_processes_that_differ_widen_the_interval():
    """Three processes at 0.9, 1.0 and 1.1 with hardly any scatter inside each: the pooled rounds know it less well."""
    source = random.Random(0)
    groups = [[source.gauss(level, 0.001) for _ in range(12)] for level in (0.9, 1.0, 1.1)]
    apart = estimate(groups)
    pooled = estimate([[value for group in groups for value in group]])
    assert apart.low < 0.91
    assert apart.high > 1.09
    assert apart.high - apart.low > pooled.high - pooled.low


def test_estimate_needs_values():
    with pytest.raises(ValueError, match="at least one group with one value"):
        estimate([[], []])


@pytest.mark.parametrize(
    ("low", "high", "kind", "bound", "expected"),
    [
        (0.99, 1.01, "ratio", 1.02, True),
        (0.97, 1.01, "ratio", 1.02, False),
        (0.99, 1.03, "ratio", 1.02, False),
        (0.6, 1.9, "ratio", 2.0, True),
        # A promise of speed: 1.25 times as fast is a gain that sides equal to a fifth leave no room for.
        (0.9, 1.1, "ratio", 0.8, True),
        (0.81, 1.24, "ratio", 0.8, True),
        (0.79, 1.1, "ratio", 0.8, False),
        (0.9, 1.26, "ratio", 0.8, False),
        (-4e-6, 4e-6, "difference", 5e-6, True),
        (-6e-6, 1e-6, "difference", 5e-6, False),
        (-1e-6, 6e-6, "difference", 5e-6, False),
    ],
)
def test_a_control_is_narrow_when_its_interval_fits_the_bound(low, high, kind, bound, expected):
    assert is_control_narrow(Estimate((low + high) / 2, low, high), kind, bound) is expected


NARROW = Estimate(1.0, 0.99, 1.01)
WIDE = Estimate(1.0, 0.9, 1.1)


@pytest.mark.parametrize(
    ("median", "control", "bound", "expected"),
    [
        (1.02, NARROW, 1.02, "met"),
        (1.021, NARROW, 1.02, "not met"),
        (1.00, WIDE, 1.02, "control wider than the bound"),
        (1.50, WIDE, 1.02, "control wider than the bound"),
        (0.70, NARROW, 0.714, "met"),
        (0.72, NARROW, 0.714, "not met"),
        (0.95, WIDE, 0.96, "control wider than the bound"),
        (1.50, NARROW, None, "no bound"),
    ],
)
def test_a_bound_counts_only_where_the_control_is_narrower(median, control, bound, expected):
    measured = Estimate(median, median - 0.01, median + 0.01)
    assert judge(measured, control, "ratio", bound) == expected


def test_differences_are_judged_in_seconds():
    control = Estimate(0.0, -1e-6, 1e-6)
    assert judge(Estimate(4.9e-6, 4e-6, 6e-6), control, "difference", 5e-6) == "met"
    assert judge(Estimate(5.1e-6, 4e-6, 6e-6), control, "difference", 5e-6) == "not met"
