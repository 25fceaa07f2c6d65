"""A report as text of a given width: sums first, then findings, then the ops by source line."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .lines import cast_fact, cut, dot_facts, fact, finding_lines, heading, limited, op_line, short, wrap
from .module_ops import ops_of_modules
from .module_text import summary_of_modules

if TYPE_CHECKING:
    from .records import OpRecord
    from .regions import Region
    from .report import Report

__all__ = ["report_text", "short", "table_text"]

_LEGEND = "       op                       rule                operands (came>used) -> results"
_FINDINGS = 20


def report_text(report: Report, *, width: int = 100, rows: int | None = None) -> str:
    """Write the whole report.

    Args:
        report: The report.
        width: The longest line. A word that is longer stays whole.
        rows: How many lines of the table at most for each region; None writes all.

    Returns:
        The text, without a newline at its end.

    Example:
        >>> from mezzo.report import Report
        >>> print(report_text(Report("loss", "jax", notes=("autocast was not applied",))))
        loss: nothing to report
        note: autocast was not applied
    """
    parts = []
    most = None if rows is None else _FINDINGS
    for region in report.regions:
        if report.framework == "torch":
            head, ops = summary_of_modules(region, width, findings=most), ops_of_modules(region, width, rows)
        else:
            head, ops = _summary(region, width), _table(region, width, rows)
        parts.append("\n".join([*head, *ops]).rstrip())
    if not parts:
        parts = [f"{report.title}: nothing to report"]
    notes = [wrap(f"note: {note}", width, "      ") for note in report.notes]
    return "\n\n".join(parts) + "".join(f"\n{note}" for note in notes)


def table_text(report: Report, *, width: int = 100, rows: int | None = None) -> str:
    """Write the ops alone.

    Args:
        report: The report.
        width: The longest line.
        rows: How many lines at most for each region; None writes all.

    Returns:
        The text, without a newline at its end; the regions' names are headings if there are several.

    Example:
        >>> from mezzo.report import Report
        >>> table_text(Report("loss", "jax"))
        ''
    """
    several = len(report.regions) > 1
    table = ops_of_modules if report.framework == "torch" else _table
    parts = ["\n".join([f"{region.name}:"] * several + table(region, width, rows)) for region in report.regions]
    return "\n\n".join(parts)


def _summary(region: Region, width: int) -> list[str]:
    totals = region.totals
    lines = [heading(region, width), *dot_facts(totals, width), cast_fact(totals, width)]
    if region.residuals is not None:
        lines.append(fact("residuals", str(region.residuals), width))
    rules = ", ".join(f"{count} {rule}" for rule, count in totals.rules.items())
    lines.append(fact("ops", f"{totals.ops}, of which {totals.changed} changed: {rules}" if rules else "none", width))
    return [*lines, "", *finding_lines(region.findings, width)]


def _table(region: Region, width: int, rows: int | None) -> list[str]:
    return limited([cut(line, width) for line in _lines(region.records)], rows, cut(_LEGEND, width))


def _lines(records: Sequence[OpRecord]) -> Iterator[str]:
    shown = (record for record in records if record.floats and (record.casts or not record.encloses))
    for place, group in itertools.groupby(shown, _place):
        yield place
        here = [*group]
        for count, record in _folded(record for record in here if not _is_as_without(record)):
            yield op_line(record, count, record.op)
        same = [record.op for record in here if _is_as_without(record)]
        if same:
            names = ", ".join(f"{count} {op}" if count > 1 else op for op, count in Counter(same).items())
            yield f"       as without autocast: {names}"


def _place(record: OpRecord) -> str:
    path = " / ".join(record.path)
    if record.source is None:
        return path or "(no source line)"
    return f"{record.source} in {path}" if path else str(record.source)


def _is_as_without(record: OpRecord) -> bool:
    """Say whether there is nothing to tell of an op: by far the most are so where autocast leaves float32 alone."""
    known = bool(record.traced_in or record.traced_out)
    return known and not (record.changed or record.reason or record.dot)


def _folded(records: Iterable[OpRecord]) -> Iterator[tuple[int, OpRecord]]:
    """Fold what is alike but for its shapes: within one line of code the order says little and the numbers much."""
    alike: dict[tuple[object, ...], list[OpRecord]] = {}
    for record in records:
        what = (record.op, record.rule, record.reason, record.came, record.used, record.gave, record.phase)
        alike.setdefault(what, []).append(record)
    for same in alike.values():
        yield len(same), same[0]
