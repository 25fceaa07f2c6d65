"""Which ops have the worst numbers: the first that is not finite, the largest losses and error. No framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from statistics import median

from .lines import percent
from .low_uses import low_uses
from .numbers import Loss, Numbers
from .records import OpRecord, SourceLine

__all__ = ["place_of", "source_text", "worst"]

_NONE = Loss()
_LOW = ("float16", "bfloat16")
_TINY = 1e-6
Measured = tuple[OpRecord, Numbers]


def worst(records: Iterable[OpRecord]) -> dict[str, tuple[str, OpRecord]]:
    """Find the ops with the worst numbers.

    Args:
        records: Any records, in the order of time; those without numbers are left out.

    Returns:
        What is bad, to how bad it is and the op: ``"not finite"`` (the first with NaN, or with Inf that is no mask's),
        ``"overflow"`` and ``"underflow"`` (the largest share that float16, or else bfloat16, would lose), ``"error"`` (the
        largest against a run in float32, of the forward pass if it has any) and ``"grad error"`` (that of the backward
        pass, if it is larger). What is nowhere is left out.

    Losses are those of results that are in a low dtype or are cast to one, before those of other runs of the same call; the
    optimizer's have none, nor has a call of which nothing is ever cast low. If the program casts nothing low at all, any op
    may have them. An error counts where the result in float32 is not next to nothing against the others.

    Example:
        >>> numbers = Numbers(4, 1e5, 0.1, losses={"float16": Loss(overflow=0.25)}, error=0.5)
        >>> found = worst([OpRecord("exp", "fp32", path=("head",), numbers=numbers)])
        >>> {what: how for what, (how, record) in found.items()}
        {'overflow': '25% in float16', 'error': '0.5'}
    """
    every = [*records]
    measured = [(record, record.numbers) for record in every if record.numbers is not None]
    return {**_not_finite(measured), **_losses(every), **_errors(measured)}


def _not_finite(measured: list[Measured]) -> dict[str, tuple[str, OpRecord]]:
    for record, numbers in measured:
        counts = [f"{count} {name}" for name, count in (("NaN", numbers.nan), ("Inf", numbers.bad_inf)) if count]
        if counts:
            return {"not finite": (f"first, {' and '.join(counts)}", record)}
    return {}


def _losses(records: list[OpRecord]) -> dict[str, tuple[str, OpRecord]]:
    found: dict[str, tuple[str, OpRecord]] = {}
    ranked = {dtype: _ranked(records, dtype) for dtype in _LOW}
    for name, share in (("overflow", _overflow), ("underflow", _underflow)):
        for dtype in _LOW:
            each = (_largest(measured, partial(share, dtype=dtype)) for measured in ranked[dtype])
            largest = next((one for one in each if one is not None), None)
            if largest is not None and name not in found:
                found[name] = (f"{percent(largest[0])} in {dtype}", largest[1])
    return found


def _ranked(records: list[OpRecord], dtype: str) -> list[list[Measured]]:
    """Give the records whose losses in a dtype count: those that are cast to it first, then those that may be."""
    lows = low_uses(records)
    measured = [
        (record, record.numbers, low)
        for record, low in zip(records, lows, strict=True)
        if record.numbers is not None and record.phase != "optimizer"
    ]
    if not any(lows):
        return [[(record, numbers) for record, numbers, _ in measured]]
    ever = {_call(record) for record, low in zip(records, lows, strict=True) if low}
    return [
        [(record, numbers) for record, numbers, low in measured if dtype in low],
        [(record, numbers) for record, numbers, _ in measured if _call(record) in ever],
    ]


def _call(record: OpRecord) -> tuple[object, ...]:
    """Say which call in the program it is, which may run often."""
    return record.op, record.phase, record.path, record.source


def _errors(measured: list[Measured]) -> dict[str, tuple[str, OpRecord]]:
    phases: dict[str, list[Measured]] = {}
    for record, numbers in measured:
        if numbers.error is not None:
            phases.setdefault(record.phase, []).append((record, numbers))
    largest = {phase: _largest_error(some) for phase, some in phases.items()}
    known = {phase: one for phase, one in largest.items() if one is not None}
    if not known:
        return {}
    value, record = known.get("forward", next(iter(known.values())))
    found = {"error": (f"{value:.2g}", record)}
    backward = known.get("backward")
    if backward is not None and backward[0] > value:
        found["grad error"] = (f"{backward[0]:.2g}", backward[1])
    return found


def _largest_error(measured: list[Measured]) -> tuple[float, OpRecord] | None:
    """Find the largest error of a pass, without that of a result that float32 has as next to nothing."""
    # A result that is e times the float32 result away from it is at most 1 + e times as large.
    sizes = [numbers.max_abs / (1 + (numbers.error or 0.0)) for _, numbers in measured]
    least = _TINY * median(sizes)
    return _largest(
        [one for one, size in zip(measured, sizes, strict=True) if not size < least],
        lambda numbers: numbers.error or 0.0,
    )


def place_of(record: OpRecord) -> str:
    """Say which op it is and where.

    Example:
        >>> place_of(OpRecord("aten::exp", "fp32", path=("head",), phase="backward"))
        'exp in head [backward]'
    """
    path = " / ".join(record.path)
    parts = [
        record.op.removeprefix("aten::"),
        f"in {path}" if path else "",
        f"at {source_text(record.source)}" if record.source else "",
    ]
    phase = f"[{record.phase}]" if record.phase != "forward" else ""
    return " ".join(part for part in (*parts, phase) if part)


def source_text(source: SourceLine) -> str:
    """Say a line; that it is in a method ``forward`` is left out, since nearly all are, and a phase has that name too.

    Example:
        >>> source_text(SourceLine("net.py", 3, "forward")), source_text(SourceLine("net.py", 9, "loss"))
        ('net.py:3', 'net.py:9 (loss)')
    """
    return source.place if source.function == "forward" else str(source)


def _overflow(numbers: Numbers, dtype: str) -> float:
    return numbers.losses.get(dtype, _NONE).overflow


def _underflow(numbers: Numbers, dtype: str) -> float:
    return numbers.losses.get(dtype, _NONE).underflow


def _largest(measured: list[Measured], value: Callable[[Numbers], float]) -> tuple[float, OpRecord] | None:
    values = [(value(numbers), record) for record, numbers in measured]
    # The first of equals, which the later ones may come from; a NaN is greater than nothing and is left out.
    largest = max(values, key=lambda pair: pair[0] if pair[0] > 0 else 0.0, default=None)
    return largest if largest is not None and largest[0] > 0 else None
