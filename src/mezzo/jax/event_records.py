"""From the events of a rewrite to the records of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mezzo.report import OpRecord, SourceLine

from .internals import Equation, Jaxpr, Literal, name_stack_text
from .lost_casts import is_marker, jaxprs_of
from .observing import Event
from .ops import canonical, traits
from .scopes import AUTOCAST, DISABLED
from .source_lines import line_of_equation
from .values import dtype_name, dtype_of

__all__ = ["in_order", "records_of"]

_DECIDED_ELSEWHERE = "inside another autocast"

_ENTERED = "enter"
_RULES_OF_DERIVATIVES = ("jvp rule", "forward", "backward")


def in_order(events: Sequence[Event]) -> list[Event]:
    """Bring the events of a region into the order of the program.

    Args:
        events: As they came: an equation that was looked at twice has two, and one around others comes after them.

    Returns:
        The last event of each equation, without those that an autocast inside of the region has decided on: it is a region
        of its own.
    """
    last = {event.key: event for event in events if event.reason != _DECIDED_ELSEWHERE}
    # Places inside of one equation are all numbers or all words, so that only whole keys need comparing as text.
    return [last[key] for key in sorted(last, key=_sortable)]


def _sortable(key: tuple[Any, ...]) -> tuple[tuple[bool, int, str], ...]:
    return tuple((isinstance(part, str), part if isinstance(part, int) else 0, str(part)) for part in key)


def records_of(events: Sequence[Event]) -> Iterator[OpRecord]:
    """Make the records of a region.

    Args:
        events: Its events, in order.

    Yields:
        One record for each equation; after one that was not entered, one for each dot inside of it.
    """
    by_key = {event.key: event for event in events}
    holding = {event.key[:-2] for event in events}
    for event in events:
        if is_marker(event):
            continue
        record = _record(event, by_key)
        yield record
        if event.rule != _ENTERED and event.key not in holding:
            yield from _dots_inside(event, record)


def _record(event: Event, by_key: Mapping[tuple[Any, ...], Event]) -> OpRecord:
    missing = len(event.came) - len(event.used)
    used = event.used + event.came[len(event.came) - missing :] if missing > 0 else event.used
    literal = [isinstance(atom, Literal) for atom in event.eqn.invars]
    # A literal takes the dtype that it is needed in when it is traced: nothing is cast when the program runs.
    came = tuple(
        after if is_literal else before for before, after, is_literal in zip(event.came, used, literal, strict=True)
    )
    return OpRecord(
        op=event.primitive,
        rule=event.rule,
        reason=event.reason,
        path=_path(event, by_key),
        source=_source(event, by_key),
        came=came,
        used=used,
        gave=event.gave,
        traced_in=event.traced_in,
        traced_out=event.traced_out,
        shapes_in=_shapes(event.shapes_in),
        shapes_out=_shapes(event.shapes_out),
        dot="dot" in traits(event.primitive),
        encloses=event.rule == _ENTERED,
        times=_times(event, by_key),
        phase="derivative" if _is_derivative(event) else "forward",
        key=event.key,
    )


def _shapes(shapes: Sequence[Sequence[Any]]) -> tuple[tuple[int | str, ...], ...]:
    return tuple(tuple(size if isinstance(size, int) else str(size) for size in shape) for shape in shapes)


def _around(event: Event, by_key: Mapping[tuple[Any, ...], Event]) -> list[Event | None]:
    """Give the events of the equations around one, outermost first; keys alternate between equation and place in it."""
    return [by_key.get(event.key[:end]) for end in range(1, len(event.key) - 1, 2)]


def _path(event: Event, by_key: Mapping[tuple[Any, ...], Event]) -> tuple[str, ...]:
    """Name what is around an equation: functions that JAX calls, and named scopes, such as those of Flax's modules."""
    around = _around(event, by_key)
    scopes = (
        [_scope(one.eqn) if one else "" for one in around] if len(around) == len(event.path) else [""] * len(event.path)
    )
    parts = [part for pair in zip(scopes, event.path, strict=True) for part in pair]
    return tuple(part for part in (*parts, _scope(event.eqn)) if part)


def _source(event: Event, by_key: Mapping[tuple[Any, ...], Event]) -> SourceLine | None:
    """Find the line of an equation, or of the innermost one around it that has one: JAX's own functions are traced apart."""
    around = [one.eqn for one in _around(event, by_key) if one]
    return next((line for one in (event.eqn, *reversed(around)) if (line := line_of_equation(one))), None)


def _scope(equation: Equation) -> str:
    names = name_stack_text(equation.source_info.name_stack).split("/")
    return "/".join(name for name in names if AUTOCAST not in name and DISABLED not in name)


def _times(event: Event, by_key: Mapping[tuple[Any, ...], Event]) -> int | None:
    times = 1
    for one in _around(event, by_key):
        if one is None:
            continue
        if one.primitive == "while":
            return None
        times *= _length(one.eqn)
    return times


def _length(equation: Equation) -> int:
    length = equation.params.get("length") if equation.primitive.name == "scan" else 1
    return length if isinstance(length, int) else 1


def _is_derivative(event: Event) -> bool:
    places = event.key[1::2]
    return any(isinstance(place, str) and place.endswith(_RULES_OF_DERIVATIVES) for place in places)


# What an equation holds that was not entered


def _dots_inside(event: Event, around: OpRecord) -> Iterator[OpRecord]:
    reason = f"inside {event.reason or event.primitive}"
    for number, (equation, times) in enumerate(_dots(event.eqn, around.times)):
        came = tuple(dtype_name(dtype_of(atom.aval)) for atom in equation.invars)
        gave = tuple(dtype_name(dtype_of(atom.aval)) for atom in equation.outvars)
        yield OpRecord(
            op=canonical(equation.primitive.name),
            rule=event.rule,
            reason=reason,
            path=(*around.path, _word(event)),
            source=line_of_equation(equation) or around.source,
            came=came,
            used=came,
            gave=gave,
            traced_in=came,
            traced_out=gave,
            shapes_in=_shapes([getattr(atom.aval, "shape", ()) for atom in equation.invars]),
            shapes_out=_shapes([getattr(atom.aval, "shape", ()) for atom in equation.outvars]),
            dot=True,
            times=times,
            phase=around.phase,
            key=(*event.key, "inside", number),
        )


def _word(event: Event) -> str:
    name = event.eqn.params.get("name")
    return f"{event.primitive} {name}" if isinstance(name, str) else event.primitive


def _dots(equation: Equation, times: int | None) -> Iterator[tuple[Equation, int | None]]:
    inner = None if times is None or equation.primitive.name == "while" else times * _length(equation)
    for jaxpr in jaxprs_of(equation):
        yield from _dots_of(jaxpr, inner)


def _dots_of(jaxpr: Jaxpr, times: int | None) -> Iterator[tuple[Equation, int | None]]:
    for equation in jaxpr.eqns:
        if "dot" in traits(canonical(equation.primitive.name)):
            yield equation, times
        yield from _dots(equation, times)
