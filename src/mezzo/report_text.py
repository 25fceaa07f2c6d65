"""A report as text of a given width: sums first, then findings, then the ops by source line."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .report_findings import Finding, in_bytes

if TYPE_CHECKING:
    from .report import Region, Report
    from .report_records import OpRecord

__all__ = ["report_text", "table_text"]

_LEGEND = "       op                       rule                operands (came>used) -> results"
_SHORT = {"bfloat16": "bf16", "bool": "bool"}
_KINDS = {"float": "f", "uint": "u", "int": "i", "complex": "c"}


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
    for region in report.regions:
        found = [line for finding in region.findings for line in _finding(finding, width)]
        head = [f"warnings ({len(region.findings)})", *found, ""] if found else []
        parts.append("\n".join([*_summary(region, width), "", *head, *_table(region, width, rows)]).rstrip())
    if not parts:
        parts = [f"{report.title}: nothing to report"]
    notes = [_wrap(f"note: {note}", width, "      ") for note in report.notes]
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
    parts = ["\n".join([f"{region.name}:"] * several + _table(region, width, rows)) for region in report.regions]
    return "\n\n".join(parts)


def _summary(region: Region, width: int) -> list[str]:
    totals = region.totals
    settings = ", ".join(value if name == "dtype" else f"{name} {value}" for name, value in region.settings.items())
    name = f"{region.name} ({region.count} times)" if region.count > 1 else region.name
    lines = [_wrap(f"{name}: {settings}" if settings else name, width, "  ")]
    for dot in totals.dots:
        runs = f", run {dot.runs} times" if dot.runs != dot.count else ""
        lines.append(_fact("dots" if dot is totals.dots[0] else "", f"{dot.count}  {dot.dtypes}{runs}", width))
    if not totals.dots:
        lines.append(_fact("dots", "none", width))
    moved = f", reading {in_bytes(totals.bytes_read)} and writing {in_bytes(totals.bytes_written)}"
    lines.append(_fact("casts", f"{totals.casts}{moved}" if totals.casts else "none", width))
    if region.residuals is not None:
        lines.append(_fact("residuals", str(region.residuals), width))
    rules = ", ".join(f"{count} {rule}" for rule, count in totals.rules.items())
    lines.append(_fact("ops", f"{totals.ops}, of which {totals.changed} changed: {rules}" if rules else "none", width))
    return lines


def _fact(name: str, text: str, width: int) -> str:
    return _wrap(f"  {name:<10} {text}", width, " " * 13)


def _finding(finding: Finding, width: int) -> list[str]:
    lines = [_wrap(f"  ! {finding}", width, "    ")]
    if finding.advice:
        lines.append(_wrap(f"    > {finding.advice}", width, "      "))
    return lines


def _wrap(text: str, width: int, indent: str) -> str:
    return "\n".join(
        textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    )


def _table(region: Region, width: int, rows: int | None) -> list[str]:
    lines = [_cut(line, width) for line in _lines(region.records)]
    legend = [_cut(_LEGEND, width)] if lines else []
    if rows is None or len(lines) <= rows:
        return legend + lines
    left = len(lines) - rows
    return [*legend, *lines[:rows], f"... and {left} more lines: print(report.table()) shows all"]


def _lines(records: Sequence[OpRecord]) -> Iterator[str]:
    shown = (record for record in records if record.floats and (record.casts or not record.encloses))
    for place, group in itertools.groupby(shown, _place):
        yield place
        here = [*group]
        for count, record in _folded(record for record in here if not _is_as_without(record)):
            yield _line(record, count)
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


def _line(record: OpRecord, count: int) -> str:
    number = f"{count} x" if count > 1 else ""
    phase = f"  [{record.phase}]" if record.phase != "forward" else ""
    reason = f"  ({record.reason})" if record.reason else ""
    return f"{number:>6} {record.op:<24} {record.rule:<19} {_dtypes(record)}{phase}{reason}".rstrip()


def _dtypes(record: OpRecord) -> str:
    operands = [
        short(came) if came == used else f"{short(came)}>{short(used)}"
        for came, used in zip(record.came, record.used, strict=True)
    ]
    return f"{_runs(operands)} -> {_runs([short(dtype) for dtype in record.gave])}".strip()


def _runs(names: Iterable[str]) -> str:
    """Join names, a run of more than two alike as one with its number."""
    parts = []
    for name, same in itertools.groupby(names):
        count = len([*same])
        parts += [f"{count}*{name}"] if count > 2 else [name] * count
    return " ".join(parts)


def short(dtype: str) -> str:
    """Shorten a dtype's name.

    Example:
        >>> short("bfloat16"), short("float32"), short("uint8"), short("float8_e4m3fn"), short("key<fry>")
        ('bf16', 'f32', 'u8', 'f8_e4m3fn', 'key<fry>')
    """
    if dtype in _SHORT:
        return _SHORT[dtype]
    for long, letter in _KINDS.items():
        if dtype.startswith(long):
            return letter + dtype.removeprefix(long)
    return dtype


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3].rstrip()}..."
