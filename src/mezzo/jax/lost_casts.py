"""What became of the casts that left no equation: which of them were to no avail, and what computes in lower precision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from mezzo.decision import LOW_DTYPES, CastPolicy
from mezzo.report import Finding

from .internals import ClosedJaxpr, Equation, Jaxpr, Literal
from .invisible_casts import InvisibleCast, marker_number
from .observing import Event
from .ops import traits
from .source_lines import line_of_equation

__all__ = ["is_marker", "jaxprs_of", "lost_casts"]

_ADVICE = "write mezzo.jax.upcast(x) for the cast, or put what computes with it into `with mezzo.jax.disabled():`"
_ENTERED = "enter"


def is_marker(event: Event) -> bool:
    """Say whether an event is that of a marker equation, not of the user's program."""
    return event.primitive == "name" and marker_number(event.eqn.params.get("name")) is not None


def jaxprs_of(equation: Equation) -> Iterator[Jaxpr]:
    """Give the jaxprs among an equation's parameters."""
    for parameter in equation.params.values():
        for one in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(one, ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, Jaxpr):
                yield one


def lost_casts(events: Sequence[Event], found: Sequence[InvisibleCast]) -> Iterator[Finding]:
    """Find the invisible casts that matter.

    A cast matters if its value is in lower precision and something computes with it there that would not had the cast been
    seen: a matrix product is lowered either way, and an op that casts to float32 itself does what the cast was for.

    Args:
        events: The events of a region.
        found: The casts that were seen while it was traced.

    Yields:
        One finding for each such cast.
    """
    uses = _Uses(events)
    seen: set[int] = set()
    for event in events:
        number = marker_number(event.eqn.params.get("name")) if is_marker(event) else None
        if number is None or number >= len(found) or number in seen or event.came[0] not in LOW_DTYPES:
            continue
        low = uses.computing_low(event)
        if low:
            seen.add(number)
            yield _finding(event, found[number], low)


def _finding(event: Event, cast: InvisibleCast, low: Sequence[Event]) -> Finding:
    places: dict[str, None] = {}
    for user in low:
        line = line_of_equation(user.eqn)
        places[f"{user.primitive} at {line.place}" if line else user.primitive] = None
    named = ", ".join([*places][:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    message = f"{cast.spelling} was lost: the value is {event.came[0]} under autocast, and so it goes into {named}"
    return Finding("invisible cast", message, _ADVICE, cast.source, event.path)


class _Uses:
    """Who reads which variable, inside of which jaxpr: the same jaxpr may be called at several places."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._by_key = {event.key: event for event in events}
        self._readers: dict[tuple[Any, ...], list[tuple[Event, int]]] = defaultdict(list)
        self._inside: dict[tuple[Any, ...], dict[tuple[Any, ...], None]] = defaultdict(dict)
        for event in events:
            place = event.key[:-1]
            self._inside[place[:-1]][place] = None
            for operand, atom in enumerate(event.eqn.invars):
                if not isinstance(atom, Literal):
                    self._readers[place, atom].append((event, operand))

    def computing_low(self, marker: Event) -> list[Event]:
        """Find what computes in lower precision with the value that a marker marks."""
        found: set[tuple[Any, ...]] = set()
        seen: set[tuple[Any, ...]] = set()
        start = (marker.key[:-1], marker.eqn.invars[0])
        left: list[tuple[Any, ...]] = [start]
        while left:
            here = left.pop()
            if here in seen:
                continue
            seen.add(here)
            for event, operand in self._readers[here]:
                # What comes before the cast reads the value and not what was to be cast.
                if _reads_low(event, operand) and not (here == start and event.key[-1] < marker.key[-1]):
                    onward = self._onward(event, operand)
                    if onward is None:
                        found.add(event.key)
                    else:
                        left += onward
            left += self._outward(*here)
        return [event for key, event in self._by_key.items() if key in found]

    def _onward(self, event: Event, operand: int) -> list[tuple[Any, ...]] | None:
        """Follow a value through what only moves or scales it, or calls with it; None if it is computed with."""
        if is_marker(event) or _is_lowered(event):
            return []
        place = event.key[:-1]
        if "moves" in traits(event.primitive) or _is_scaled(event, operand):
            return [(place, result) for result in event.eqn.outvars]
        if event.rule != _ENTERED:
            return None
        count = len(event.eqn.invars)
        return [
            (inside, jaxpr.invars[operand - count])
            for jaxpr in jaxprs_of(event.eqn)
            if len(jaxpr.invars) >= count - operand
            for inside in self._inside[event.key]
        ]

    def _outward(self, place: tuple[Any, ...], variable: Any) -> list[tuple[Any, ...]]:
        """Follow a value that an inner function returns, if it comes out in lower precision."""
        caller = self._by_key.get(place[:-1]) if place else None
        if caller is None or caller.rule != _ENTERED:
            return []
        outside, results = caller.key[:-1], caller.eqn.outvars
        return [
            (outside, result)
            for jaxpr in jaxprs_of(caller.eqn)
            for atom, result, gave in zip(jaxpr.outvars, results, caller.gave, strict=False)
            if atom is variable and gave in LOW_DTYPES
        ]


def _is_scaled(event: Event, operand: int) -> bool:
    """Say whether a value is multiplied by one number, such as logits by ``1 / sqrt(d)``: no digits cancel there."""
    others = [shape for place, shape in enumerate(event.shapes_in) if place != operand]
    return event.primitive in ("mul", "div") and operand == 0 and others == [()]


def _reads_low(event: Event, operand: int) -> bool:
    return operand < len(event.used) and event.used[operand] in LOW_DTYPES


def _is_lowered(event: Event) -> bool:
    return event.rule == CastPolicy.LOWER_PRECISION_FP
