"""The ops of a program that is made of modules as lines of text: in the order of time, by module and line of code."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .lines import cut, numbers_text, op_line, short, wrap
from .numbers import Numbers
from .ops import ran_in
from .worst import source_text

if TYPE_CHECKING:
    from .records import OpRecord
    from .regions import Region

__all__ = ["ops_of_modules"]

_LEGEND = "       op                       rule                operands (came>used, ~ kept cast) -> results"
_UNLISTED = ("not listed", "autocast off", "backward")


def ops_of_modules(region: Region, width: int, rows: int | None) -> list[str]:
    """Write the ops in the order of time, under the module and the line they are from.

    Args:
        region: The region.
        width: The longest line.
        rows: How many lines at most; None writes all. What is beyond them costs nothing.

    Returns:
        Lines: ops of a line of code that are alike are one, and those without rule and cast are only named.
    """
    shown = [record for record in region.records if record.floats and (record.casts or not record.encloses)]
    lines = [cut(_LEGEND, width)] if shown else []
    told = 0
    for line, ops in _lines(shown, width):
        if rows is not None and len(lines) > rows:
            return [*lines, f"... and {len(shown) - told} more ops: print(report.table()) shows all"]
        lines.append(cut(line, width))
        told += ops
    return lines


def _lines(records: Iterable[OpRecord], width: int) -> Iterator[tuple[str, int]]:
    """Give each line with the number of ops that it tells of."""
    for place, group in itertools.groupby(records, _place):
        yield place, 0
        here = [*group]
        for same in _folded(record for record in here if not _is_plain(record)):
            # That it is the rule of the table is what the column of rules says.
            reason = "" if same[0].reason.startswith("rule of ") else same[0].reason.replace("aten::", "")
            yield op_line(same[0], len(same), _name(same[0]), phase=False, reason=reason), len(same)
            numbers = [record.numbers for record in same if record.numbers is not None]
            if numbers:
                yield f"{'':>7}{'':<24} {numbers_text(Numbers.merge(numbers))}", 0
        for (rule, dtype), counts in _plain(here).items():
            names = ", ".join(f"{count} {op}" if count > 1 else op for op, count in counts.items())
            *first, last = wrap(f"       {rule}, {dtype}: {names}", width, " " * 9).splitlines()
            yield from ((line, 0) for line in first)
            yield last, sum(counts.values())


def _place(record: OpRecord) -> str:
    path = " / ".join(record.path) or "(outside of modules)"
    phase = f"  [{record.phase}]" if record.phase != "forward" else ""
    rank = "" if record.rank is None else f"  rank {record.rank}"
    return (f"{path}  {source_text(record.source)}" if record.source else path) + phase + rank


def _name(record: OpRecord) -> str:
    return record.op.removeprefix("aten::")


def _is_plain(record: OpRecord) -> bool:
    """Say whether there is nothing to tell of an op but its name: no rule, no cast, one dtype throughout."""
    dtypes = {dtype for dtype in record.used + record.gave if dtype.startswith(("float", "bfloat", "complex"))}
    same = len(dtypes) == 1 and record.came == record.used
    return same and record.rule in _UNLISTED and not record.dot and record.numbers is None


def _plain(records: Iterable[OpRecord]) -> dict[tuple[str, str], Counter[str]]:
    """Name the ops of which there is nothing else to tell, by rule and dtype."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for record in filter(_is_plain, records):
        found.setdefault((record.rule, short(ran_in(record))), Counter())[_name(record)] += 1
    return found


def _folded(records: Iterable[OpRecord]) -> Iterator[list[OpRecord]]:
    alike: dict[tuple[object, ...], list[OpRecord]] = {}
    for record in records:
        what = (record.op, record.rule, record.reason, record.came, record.used, record.gave, record.kept)
        alike.setdefault(what, []).append(record)
    yield from alike.values()
