"""The statistics of paired timings: pure functions over numbers that were measured elsewhere.

One round times the same work on three sides, one after the other: mezzo, PyTorch, and PyTorch again in
another process (the control). What is compared is always within a round, so that a machine that is slow
for a second is slow for all three; the control says how far two equal sides drift apart anyway.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["ratio", "difference"]
Side = Literal["mezzo", "torch", "control"]
Verdict = Literal["met", "not met", "control wider than the bound", "no bound"]

SIDES: tuple[Side, ...] = ("mezzo", "torch", "control")


class Round(NamedTuple):
    """Seconds per iteration of each side, taken next to one another."""

    mezzo: float
    torch: float
    control: float


@dataclass(frozen=True)
class Estimate:
    """A median and its 95% interval."""

    median: float
    low: float
    high: float


def turns(index: int) -> tuple[Side, ...]:
    """The order of the sides in round ``index``.

    Every second round runs backwards, so that a drift in speed favours nobody. PyTorch stays in the middle:
    both the others are then compared with a direct neighbour.
    """
    return SIDES if index % 2 == 0 else SIDES[::-1]


def next_iterations(seconds: float, iterations: int, target: float) -> int:
    """How many iterations to try next so that a round takes about ``target`` seconds.

    A measurement much shorter than the target is mostly noise, so one step grows at most a hundredfold.
    """
    if seconds <= 0.0:
        return iterations * 100
    return max(1, min(iterations * 100, round(iterations * target / seconds)))


def compare(rounds: Sequence[Round], kind: Kind, side: Literal["mezzo", "control"]) -> list[float]:
    """``side`` against PyTorch, round by round: ratios, or differences in seconds."""
    pairs = [(getattr(one, side), one.torch) for one in rounds]
    if kind == "ratio":
        return [mine / theirs for mine, theirs in pairs]
    return [mine - theirs for mine, theirs in pairs]


def estimate(groups: Sequence[Sequence[float]], *, resamples: int = 2000, seed: int = 0) -> Estimate:
    """The median of all values and a 95% bootstrap interval for it.

    Args:
        groups: The values, one group for each set of processes. Where a process happens to lie in memory
            moves all of its rounds alike, so groups are drawn first and rounds within them second; an
            interval over the pooled rounds alone would be too narrow.
        resamples: How many bootstrap samples to draw.
        seed: Makes the interval reproducible.
    """
    filled = [list(group) for group in groups if group]
    if not filled:
        message = "estimate() got no values; it needs at least one group with one value."
        raise ValueError(message)
    draw = random.Random(seed)
    medians = sorted(
        median(value for group in draw.choices(filled, k=len(filled)) for value in draw.choices(group, k=len(group)))
        for _ in range(resamples)
    )
    tail = round(0.025 * (resamples - 1))
    middle = median(value for group in filled for value in group)
    return Estimate(middle, medians[tail], medians[-1 - tail])


def is_control_narrow(control: Estimate, kind: Kind, bound: float) -> bool:
    """Whether two PyTorch processes agree with each other more closely than ``bound`` asks of mezzo.

    A ratio below 1 asks mezzo to be faster: then two equal sides must differ by less than that gain.
    """
    if kind == "ratio":
        reach = max(bound, 1.0 / bound)
        return 1.0 / reach <= control.low and control.high <= reach
    return control.low >= -bound and control.high <= bound


def judge(measured: Estimate, control: Estimate, kind: Kind, bound: float | None) -> Verdict:
    """Hold a measurement against its bound; where the control is no narrower, the bound cannot be judged."""
    if bound is None:
        return "no bound"
    if not is_control_narrow(control, kind, bound):
        return "control wider than the bound"
    return "met" if measured.median <= bound else "not met"
