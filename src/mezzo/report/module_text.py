"""The text of a program that is made of modules: sums, findings, and the tree of modules.

For PyTorch, where ops are seen as they run, so that there is nothing to compare with that would run without autocast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .findings import in_bytes
from .lines import (
    cast_fact,
    cut,
    dot_facts,
    fact,
    finding_lines,
    heading,
    numbers_text,
    percent,
)
from .modules import ModuleTotals, module_tree, numbers_by_phase
from .numbers import Numbers
from .ops import DtypeTotals, totals_by_dtype
from .tree import Row, tree_rows
from .worst import place_of, worst

if TYPE_CHECKING:
    from .regions import Region

__all__ = ["has_errors", "listed_text", "summary_of_modules"]

_TREE_ROWS = 40
_LABEL = 32


def summary_of_modules(region: Region, width: int, *, findings: int | None = None) -> list[str]:
    """Write what the ops add up to, the findings, and the tree of modules.

    Args:
        region: The region.
        width: The longest line.
        findings: How many findings at most; None writes all.

    Returns:
        Lines, the last of them empty.
    """
    totals = region.totals
    lines = [heading(region, width), *dot_facts(totals, width), cast_fact(totals, width)]
    results = ", ".join(f"{in_bytes(size)} {dtype}" for dtype, size in totals.results.items() if size)
    lines.append(fact("results", f"{in_bytes(totals.bytes_given)}: {results}" if results else "none", width))
    lines.append(fact("ops", f"{totals.ops}: {_counted(totals.rules)}" if totals.ops else "none", width))
    for dtype, ops in totals_by_dtype(region.records).items():
        if ops.listed:
            lines.append(fact(dtype, listed_text(ops), width))
    if [*totals.phases] not in ([], ["forward"]):
        lines.append(fact("phases", _counted(totals.phases), width))
    for phase, numbers in numbers_by_phase(region.records).items():
        lines.append(fact(phase, numbers_text(numbers, losses=phase != "optimizer"), width))
    for what, (how, record) in worst(region.records).items():
        lines.append(fact(what, f"{how}: {place_of(record)}", width))
    found = finding_lines(region.findings, width, paths=True, most=findings)
    return [*lines, "", *found, *_tree(module_tree(region.records), width)]


def listed_text(ops: DtypeTotals) -> str:
    """Name the ops that the policy has a rule for, and say how many others ran in the dtype.

    Example:
        >>> listed_text(DtypeTotals("bfloat16", {"aten::linear": 12}, {"aten::add": 5}, 0))
        '12 linear; 5 others'
    """
    names = ", ".join(f"{count} {op.removeprefix('aten::')}" for op, count in ops.listed.items())
    others = sum(ops.others.values())
    return f"{names}; {others} others" if others else names


def has_errors(tree: ModuleTotals) -> bool:
    """Say whether there was a run in float32 to compare with.

    Example:
        >>> has_errors(module_tree([]))
        False
    """
    return any(numbers.error is not None for numbers in tree.numbers.values())


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _tree(tree: ModuleTotals, width: int) -> list[str]:
    if not tree.modules:
        return []
    rows, left = tree_rows(tree, rows=_TREE_ROWS)
    head = f"{'modules':<{_LABEL}}{'ops':>6}{'casts':>7}{'moved':>11}{'results':>11}{'low':>8}"
    errors = has_errors(tree)
    if tree.numbers:
        head += f"{'max out':>9}{'max grad':>9}" + (f"{'error':>7}" if errors else "")
    told = [_row(row, numbers=bool(tree.numbers), errors=errors) for row in rows]
    lines = [cut(line, width).rstrip() for line in (head, *told)]
    levels = f"{left} deeper level" + ("s" if left > 1 else "")
    more = [f"... {levels}: see report.modules, or save the report as .html"] if left else []
    return [*lines, *more, ""]


def _row(row: Row, *, numbers: bool, errors: bool) -> str:
    totals = row.module.totals
    low = "" if totals.low_share is None else percent(totals.low_share)
    moved = in_bytes(totals.bytes_read + totals.bytes_written) if totals.casts else "-"
    label = cut("  " * row.depth + row.text, _LABEL - 1)
    line = f"{label:<{_LABEL}}{totals.ops:>6}{totals.casts:>7}{moved:>11}{in_bytes(totals.bytes_given):>11}{low:>8}"
    return line + _numbers(row.module, errors=errors) if numbers else line


def _numbers(module: ModuleTotals, *, errors: bool) -> str:
    forward, backward = module.numbers.get("forward"), module.numbers.get("backward")
    cells = f"{_largest(forward):>9}{_largest(backward):>9}"
    if not errors:
        return cells
    known = [numbers.error for numbers in (forward, backward) if numbers and numbers.error is not None]
    error = f"{max(known):.1g}" if known else ""
    return f"{cells}{error:>7}"


def _largest(numbers: Numbers | None) -> str:
    if numbers is None:
        return ""
    return "NaN" if numbers.nan else "Inf" if numbers.bad_inf else f"{numbers.max_abs:.2g}"
