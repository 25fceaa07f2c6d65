"""Which ops have the worst numbers: the first that is not finite, the largest losses and error. No framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from .report_lines import percent
from .report_numbers import Loss, Numbers
from .report_records import OpRecord, SourceLine

__all__ = ["place_of", "source_text", "worst"]

_NONE = Loss()
_LOW = ("float16", "bfloat16")


def worst(records: Iterable[OpRecord]) -> dict[str, tuple[str, OpRecord]]:
    """Find the ops with the worst numbers.

    Args:
        records: Any records, in the order of time; those without numbers are left out.

    Returns:
        What is bad, to how bad it is and the op: ``"not finite"`` (the first with NaN or Inf), ``"overflow"`` and
        ``"underflow"`` (the largest share that float16, or else bfloat16, would lose) and ``"error"`` (the largest against
        a run in float32). What is nowhere is left out.

    Example:
        >>> numbers = Numbers(4, 1e5, 0.1, losses={"float16": Loss(overflow=0.25)}, error=0.5)
        >>> found = worst([OpRecord("exp", "fp32", path=("head",), numbers=numbers)])
        >>> {what: how for what, (how, record) in found.items()}
        {'overflow': '25% in float16', 'error': '0.5'}
    """
    measured = [(record, record.numbers) for record in records if record.numbers is not None]
    found: dict[str, tuple[str, OpRecord]] = {}
    for record, numbers in measured:
        if numbers.nan or numbers.inf:
            counts = [f"{count} {name}" for name, count in (("NaN", numbers.nan), ("Inf", numbers.inf)) if count]
            found["not finite"] = (f"first, {' and '.join(counts)}", record)
            break
    for name, share in (("overflow", _overflow), ("underflow", _underflow)):
        for dtype in _LOW:
            largest = _largest(measured, partial(share, dtype=dtype))
            if largest is not None and name not in found:
                found[name] = (f"{percent(largest[0])} in {dtype}", largest[1])
    error = _largest(measured, lambda numbers: numbers.error or 0.0)
    if error is not None:
        found["error"] = (f"{error[0]:.2g}", error[1])
    return found


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


def _largest(
    measured: list[tuple[OpRecord, Numbers]], value: Callable[[Numbers], float]
) -> tuple[float, OpRecord] | None:
    values = [(value(numbers), record) for record, numbers in measured]
    # The first of equals, which the later ones may come from; a NaN is greater than nothing and is left out.
    largest = max(values, key=lambda pair: pair[0] if pair[0] > 0 else 0.0, default=None)
    return largest if largest is not None and largest[0] > 0 else None
