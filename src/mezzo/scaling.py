"""How a loss scale moves: the numbers, the state, and the pure step from one state to the next.

No gradients and no framework: an adapter looks at gradients, says what it saw as a `Verdict`, and gets the next state.
A scale is a float32 number, whatever framework holds it, so the arithmetic here rounds to float32 as theirs does.
"""

from __future__ import annotations

import math
import operator
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .errors import ScalingError

__all__ = ["LossScaling", "ScaleState", "Verdict"]

_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32. Below it lie scales whose inverse is infinite, and gradients would become so too."""

_LARGEST_INTERVAL = 2**63 - 1
"""What fits into the integers of the frameworks."""


class Verdict(StrEnum):
    """What a look at the gradients of one iteration found.

    Attributes:
        FINITE: Neither Inf nor NaN.
        INF: At least one Inf, perhaps with NaN: what a scale that is too large gives.
        NAN: NaN and no Inf: perhaps the scale, and if it lasts, rather a fault of the model or the data.

    Example:
        >>> Verdict("inf")
        <Verdict.INF: 'inf'>
    """

    FINITE = "finite"
    INF = "inf"
    NAN = "nan"


@dataclass(frozen=True)
class ScaleState:
    """What changes while a run goes on. A value: `LossScaling.next` gives a new one.

    Attributes:
        scale: The factor of the loss, rounded to float32. Not checked: the scale of an old checkpoint may be anything.
        growth_tracker: How many finite iterations there were in a row since the scale last moved.
        nan_backoffs: How many times in a row the scale was backed off for NaN.

    Example:
        >>> ScaleState(0.1)
        ScaleState(scale=0.10000000149011612, growth_tracker=0, nan_backoffs=0)
    """

    scale: float
    growth_tracker: int = 0
    nan_backoffs: int = 0

    def __post_init__(self) -> None:
        """Round the scale."""
        object.__setattr__(self, "scale", _float32(self.scale))


@dataclass(frozen=True)
class LossScaling:
    """The numbers of dynamic loss scaling, and the rule by which the scale moves.

    The rule is PyTorch's, with a floor, a ceiling, and a limit to what is blamed on the scale. With the defaults, a run
    that is healthy under PyTorch has the same scales here. A frozen value; threads may share one.

    Any real number will do for each (also NumPy's, or a tensor of one element); it is kept as a ``float`` or ``int``.

    Attributes:
        init_scale: The first scale; finite in float32 and at least 2**-126.
        growth_factor: Above 1. What the scale is multiplied by after ``growth_interval`` finite iterations in a row.
        backoff_factor: Between 0 and 1. What the scale is multiplied by after an iteration that was not finite.
        growth_interval: At least 1.
        min_scale: The floor, at least 2**-126. Backing off stops here; a scale that is lower already stays.
        max_scale: The ceiling, or None. Growth stops here; a scale that is higher already stays. Without a ceiling it
            stops before the scale would be infinite.
        max_nan_backoffs: After so many backoffs in a row for NaN (without any Inf) the scale stays: a NaN that outlives
            them does not come from the scale. None never stops, as PyTorch.

    Raises:
        ScalingError: A number is none, or is not allowed.

    Example:
        >>> numbers = LossScaling(init_scale=1024.0, growth_interval=2)
        >>> state = numbers.start()
        >>> for verdict in (Verdict.INF, Verdict.FINITE, Verdict.FINITE):
        ...     state = numbers.next(state, verdict)
        ...     print(state.scale, state.growth_tracker)
        512.0 0
        512.0 1
        1024.0 0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-24
    max_scale: float | None = None
    max_nan_backoffs: int | None = 8

    def __post_init__(self) -> None:
        """Check the numbers and keep them as Python's own."""
        checked: dict[str, Any] = {
            "init_scale": _scale("init_scale", self.init_scale, "pass one such as 65536.0"),
            "growth_factor": _growth_factor(self.growth_factor),
            "backoff_factor": _backoff_factor(self.backoff_factor),
            "growth_interval": _whole("growth_interval", self.growth_interval, 1, "pass one such as 2000"),
            "min_scale": _scale("min_scale", self.min_scale, f"for the lowest floor pass 2.0**-126 ({2.0**-126})"),
        }
        if self.max_scale is not None:
            checked["max_scale"] = _ceiling(self.max_scale, checked["min_scale"])
        if self.max_nan_backoffs is not None:
            advice = "pass one such as 8, or None to back off for every NaN"
            checked["max_nan_backoffs"] = _whole("max_nan_backoffs", self.max_nan_backoffs, 0, advice)
        for name, number in checked.items():
            object.__setattr__(self, name, number)

    def start(self) -> ScaleState:
        """Give the state before the first iteration.

        Returns:
            ``init_scale`` rounded to float32, with nothing counted.

        Example:
            >>> LossScaling().start()
            ScaleState(scale=65536.0, growth_tracker=0, nan_backoffs=0)
        """
        return ScaleState(self.init_scale)

    def next(self, state: ScaleState, verdict: Verdict) -> ScaleState:
        """Give the state after an iteration. Pure: the same arguments give the same state.

        Args:
            state: The state in which the iteration ran.
            verdict: What its gradients were; the word will do.

        Returns:
            A new state.

        Raises:
            ScalingError: The verdict is none.

        Example:
            >>> LossScaling().next(ScaleState(65536.0, growth_tracker=7), Verdict.NAN)
            ScaleState(scale=32768.0, growth_tracker=0, nan_backoffs=1)
        """
        found = _verdict(verdict)
        if found is Verdict.FINITE:
            return self._after_finite(state)
        if found is Verdict.INF:
            return ScaleState(self._backed_off(state.scale))
        if self.max_nan_backoffs is not None and state.nan_backoffs >= self.max_nan_backoffs:
            return ScaleState(state.scale, nan_backoffs=state.nan_backoffs)
        return ScaleState(self._backed_off(state.scale), nan_backoffs=state.nan_backoffs + 1)

    def _after_finite(self, state: ScaleState) -> ScaleState:
        tracker = state.growth_tracker + 1
        # Not equality, as PyTorch's: there a tracker that a shortened interval left behind never grows the scale again.
        if tracker < self.growth_interval:
            return ScaleState(state.scale, tracker)
        grown = _float32(state.scale * self.growth_factor)
        if not math.isfinite(grown):
            grown = state.scale
        elif self.max_scale is not None:
            grown = min(grown, max(state.scale, _float32(self.max_scale)))
        return ScaleState(grown)

    def _backed_off(self, scale: float) -> float:
        return max(_float32(scale * self.backoff_factor), min(scale, _float32(self.min_scale)))


def _float32(value: float) -> float:
    """Round to the nearest float32; infinite where that overflows."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def _verdict(given: object) -> Verdict:
    if isinstance(given, str) and given in set(Verdict):
        return Verdict(given)
    msg = f"{given!r} is not a verdict; allowed are {', '.join(Verdict)}."
    raise ScalingError(msg)


# What the numbers may be


def _number(name: str, given: Any, rule: str, advice: str) -> float:
    # A string or a truth value in place of a number is a mistake, though float() takes both. Strings have no __float__.
    if not isinstance(given, bool) and (hasattr(type(given), "__float__") or hasattr(type(given), "__index__")):
        try:
            return float(given)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass  # such as a tensor of two elements, or an int that no float can hold
    raise _refusal(given, name, rule, advice)


def _refusal(given: Any, name: str, rule: str, advice: str) -> ScalingError:
    return ScalingError(f"{rule} Got {name}={given!r}; {advice}.")


def _scale(name: str, given: Any, advice: str) -> float:
    rule = f"{name} must be finite in float32 and at least 2**-126, or its inverse would not be finite."
    number = _number(name, given, rule, advice)
    if not _SMALLEST_SCALE <= _float32(number) < math.inf:
        raise _refusal(given, name, rule, advice)
    return number


def _ceiling(given: Any, floor: float) -> float:
    number = _scale("max_scale", given, "pass None for no ceiling")
    if _float32(number) < _float32(floor):
        rule = "max_scale must not be below min_scale."
        raise _refusal(given, "max_scale", rule, f"min_scale is {floor!r}, so raise one or lower the other")
    return number


def _growth_factor(given: Any) -> float:
    rule, advice = "The growth factor must be > 1.0.", "pass a finite number above 1.0, such as 2.0"
    number = _number("growth_factor", given, rule, advice)
    if not 1.0 < number < math.inf:
        raise _refusal(given, "growth_factor", rule, advice)
    return number


def _backoff_factor(given: Any) -> float:
    rule, advice = "The backoff factor must be < 1.0.", "pass a number between 0.0 and 1.0, such as 0.5"
    number = _number("backoff_factor", given, rule, advice)
    if number <= 0.0:
        raise _refusal(given, "backoff_factor", "The backoff factor must be > 0.0.", advice)
    if not number < 1.0:
        raise _refusal(given, "backoff_factor", rule, advice)
    return number


def _whole(name: str, given: Any, least: int, advice: str) -> int:
    rule = f"{name} must be a whole number from {least} to 2**63 - 1."
    try:
        # First as an integer: a float would round a large one.
        number = operator.index(given)
    except TypeError:
        real = _number(name, given, rule, advice)
        number = int(real) if real.is_integer() else -1
    if isinstance(given, bool) or not least <= number <= _LARGEST_INTERVAL:
        raise _refusal(given, name, rule, advice)
    return number
