"""Recorded ops made by hand."""

from __future__ import annotations

from typing import Any

from mezzo.report import Finding
from mezzo.report.records import OpRecord, SourceLine
from mezzo.torch.linting.findings import findings_of
from mezzo.torch.recording.recorded import RecordedOp

SHAPE = (32, 16)


def op(
    name: str,
    index: int = 0,
    *,
    came: str = "",
    used: str = "",
    gave: str = "",
    rule: str = "not listed",
    path: str = "net",
    line: int = 1,
    shapes: tuple[tuple[int, ...], ...] = (),
    shape_out: tuple[int, ...] = SHAPE,
    producers: tuple[int, ...] = (),
    parameters: tuple[str | None, ...] = (),
    scalars: tuple[float, ...] = (),
    autocast: str | None = "float16",
    callers: tuple[str, ...] = (),
    is_leaf: tuple[bool, ...] = (),
    **more: Any,
) -> RecordedOp:
    """Make a recorded op; dtypes are words in one string, ``"float16 float32"``."""
    operands = tuple(came.split())
    results = tuple(gave.split())
    record = OpRecord(
        f"aten::{name}",
        rule,
        path=(path,) if path else (),
        source=SourceLine("net.py", line, "forward"),
        came=operands,
        used=tuple(used.split()) or operands,
        gave=results,
        shapes_in=shapes or (SHAPE,) * len(operands),
        shapes_out=(shape_out,) * len(results),
        **more,
    )
    return RecordedOp(
        record,
        index,
        producers or (-1,) * len(operands),
        parameters or (None,) * len(operands),
        scalars,
        autocast,
        frozenset(callers),
        record.op,
        is_leaf or (False,) * len(operands),
    )


def kinds(*ops: RecordedOp) -> list[str]:
    """Give the kinds of the findings in ops."""
    return [finding.kind for finding in findings_of(ops)]


def only(kind: str, *ops: RecordedOp) -> Finding:
    """Give the one finding of a kind in ops."""
    [found] = [finding for finding in findings_of(ops) if finding.kind == kind]
    return found
