"""How a report is shown on a terminal: sums, findings, the tree of modules, the ops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mezzo.report import Finding, ModuleTotals, OpTotals, Region, Report
from mezzo.report.findings import in_bytes
from mezzo.report.lines import numbers_text, percent, short
from mezzo.report.module_text import has_errors, listed_text
from mezzo.report.modules import numbers_by_phase
from mezzo.report.numbers import Numbers
from mezzo.report.ops import totals_by_dtype
from mezzo.report.tree import Row, tree_rows
from mezzo.report.worst import place_of, worst

__all__ = ["show"]

_STYLES = {"bfloat16": "green", "float16": "green", "float32": "cyan", "float64": "magenta"}


def show(report: Report, console: Console, *, rows: int | None = 40) -> None:
    """Print a report: a panel of sums, findings with advice, a table of the modules and one of the ops.

    Args:
        report: The report.
        console: Where to print. Nothing is wider than it; names that are longer are folded.
        rows: How many rows at most for each of the two tables, and how many findings; None prints all.

    Example:
        >>> show(Report("loss", "jax"), Console(width=40))
        ╭─ loss ───────────────────────────────╮
        │ nothing to report                    │
        ╰──────────────────────────────────────╯
    """
    console.print(_summary(report))
    for part in (_findings(report.warnings, rows), _modules(report.modules, rows), _ops(report.by_op, rows)):
        if part is not None:
            console.print(part)
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"))


# Sums


def _summary(report: Report) -> Panel:
    regions = [_region(region) for region in report.regions]
    return Panel(
        Group(*regions) if regions else Text("nothing to report"), title=Text(report.title), title_align="left"
    )


def _region(region: Region) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _facts(region):
        grid.add_row(name, value)
    settings = ", ".join(value if name == "dtype" else f"{name} {value}" for name, value in region.settings.items())
    times = f" ({region.count} times)" if region.count > 1 else ""
    head = Text(f"{region.name}{times}: {settings}" if settings else f"{region.name}{times}")
    return Group(head, Padding(grid, (0, 0, 0, 2)))


def _facts(region: Region) -> Iterator[tuple[str, Text]]:
    totals = region.totals
    if not totals.ops:
        # Nothing was watched, as for findings of lint, or nothing ran.
        return
    for dot in totals.dots:
        runs = f", run {dot.runs} times" if dot.runs != dot.count else ""
        yield "dots" if dot is totals.dots[0] else "", Text(f"{dot.count}  {dot.dtypes}{runs}", style=_style(dot.gave))
    moved = f", reading {in_bytes(totals.bytes_read)} and writing {in_bytes(totals.bytes_written)}"
    yield "casts", Text(f"{totals.casts}{moved}" if totals.casts else "none")
    yield "results", Text(", ".join(f"{in_bytes(size)} {dtype}" for dtype, size in totals.results.items()) or "none")
    if region.residuals is not None:
        yield "residuals", Text(str(region.residuals))
    yield "ops", Text(f"{totals.ops}: {_counted(totals.rules)}")
    for dtype, ops in totals_by_dtype(region.records).items():
        if ops.listed:
            yield dtype, Text(listed_text(ops), style=_style([dtype]))
    if len(totals.phases) > 1:
        yield "phases", Text(_counted(totals.phases))
    for phase, numbers in numbers_by_phase(region.records).items():
        yield phase, Text(numbers_text(numbers, losses=phase != "optimizer"))
    for what, (how, record) in worst(region.records).items():
        yield what, Text(f"{how}: {place_of(record)}", style="yellow")


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _style(dtypes: Iterable[str]) -> str:
    return next((_STYLES[dtype] for dtype in dtypes if dtype in _STYLES), "")


# Findings


def _findings(findings: tuple[Finding, ...], rows: int | None) -> RenderableType | None:
    if not findings:
        return None
    table = _table(f"{len(findings)} findings" if len(findings) > 1 else "1 finding")
    table.add_column("what", style="yellow", overflow="fold", ratio=1)
    table.add_column("where, why, and what to do", overflow="fold", ratio=4)
    for finding in findings[:rows]:
        where = " ".join(["/".join(finding.path), f"at {finding.source}" if finding.source else ""]).strip()
        told = Text("\n").join(Text(part, style=style) for part, style in _told(finding, where) if part)
        table.add_row(Text(finding.kind), told)
    return _with_rest(table, len(findings) - len(findings[:rows]), "findings: see report.warnings")


def _told(finding: Finding, where: str) -> tuple[tuple[str, str], ...]:
    times = f" ({finding.count} times)" if finding.count > 1 else ""
    return (where, "bold"), (f"{finding.message}{times}", ""), (finding.advice, "green")


# Modules


def _modules(tree: ModuleTotals, rows: int | None) -> RenderableType | None:
    if not tree.modules:
        return None
    laid, left = tree_rows(tree, rows=rows)
    table = _table("modules")
    table.add_column("module", overflow="fold", min_width=12)
    for name in ("ops", "casts", "bytes\ncast", "bytes\ngiven", "low"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in laid:
        table.add_row(*_module_cells(row))
    shown = Group(table, _numbers(laid, errors=has_errors(tree))) if tree.numbers else table
    return _with_rest(shown, left, "levels of modules: see report.modules, or save the report as .html")


def _numbers(rows: Iterable[Row], *, errors: bool) -> Table:
    """Lay out the numbers: results of the forward pass, then those of the backward pass, which are gradients."""
    table = _table("numbers, and what float16 would lose of them")
    table.add_column("module", overflow="fold", min_width=12)
    for name in ("max\nforward", "to inf", "to 0", "max\nbackward", "min\nbackward", "to inf", "to 0"):
        table.add_column(name, justify="right", no_wrap=True)
    if errors:
        table.add_column("error", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(_label(row), *_number_cells(row.module), *([_error(row.module)] if errors else []))
    return table


def _label(row: Row) -> Text:
    return Text("  " * row.depth + row.text, style="bold" if row.depth == 0 else "")


def _module_cells(row: Row) -> Iterator[Text]:
    totals = row.module.totals
    yield _label(row)
    yield Text(str(totals.ops))
    yield Text(str(totals.casts), style="yellow" if totals.casts else "dim")
    yield Text(in_bytes(totals.bytes_read + totals.bytes_written) if totals.casts else "-")
    yield Text(in_bytes(totals.bytes_given))
    yield Text("-" if totals.low_share is None else percent(totals.low_share))


def _number_cells(module: ModuleTotals) -> Iterator[Text]:
    forward, backward = module.numbers.get("forward"), module.numbers.get("backward")
    yield _largest(forward)
    yield from _lost(forward)
    yield _largest(backward)
    yield Text(f"{backward.min_abs:.2g}" if backward else "-")
    yield from _lost(backward)


def _error(module: ModuleTotals) -> Text:
    phases = (module.numbers.get("forward"), module.numbers.get("backward"))
    known = [numbers.error for numbers in phases if numbers and numbers.error is not None]
    return Text(f"{max(known):.1g}" if known else "-")


def _lost(numbers: Numbers | None) -> Iterator[Text]:
    loss = numbers.losses.get("float16") if numbers else None
    for share in (loss.overflow, loss.underflow) if loss else (0.0, 0.0):
        yield Text(percent(share), style="red") if share else Text("-", style="dim")


def _largest(numbers: Numbers | None) -> Text:
    if numbers is None:
        return Text("-", style="dim")
    if numbers.nan or numbers.bad_inf:
        return Text("NaN" if numbers.nan else "Inf", style="red")
    return Text(f"{numbers.max_abs:.2g}")


# Ops


def _ops(ops: tuple[OpTotals, ...], rows: int | None) -> RenderableType | None:
    if not ops:
        return None
    table = _table("ops, the most frequent first")
    table.add_column("op", overflow="fold", min_width=10)
    table.add_column("calls", justify="right", no_wrap=True)
    for name in ("ran in", "rules"):
        table.add_column(name, overflow="fold")
    for name in ("casts", "bytes\ngiven"):
        table.add_column(name, justify="right", no_wrap=True)
    measured = any(one.numbers for one in ops)
    if measured:
        table.add_column("max", justify="right", no_wrap=True)
    for one in ops[:rows]:
        table.add_row(*_op_cells(one), *([_largest_of(one.numbers.values())] if measured else []))
    return _with_rest(table, len(ops) - len(ops[:rows]), "ops: see report.by_op")


def _op_cells(one: OpTotals) -> Iterator[Text]:
    yield Text(one.op.removeprefix("aten::"))
    yield Text(str(one.totals.ops))
    ran = [
        Text(f"{count} {_shortened(dtype)}", style=_STYLES.get(dtype, "yellow")) for dtype, count in one.dtypes.items()
    ]
    yield Text(", ").join(ran)
    yield Text(
        ", ".join(f"{count} {rule}" if len(one.totals.rules) > 1 else rule for rule, count in one.totals.rules.items())
    )
    yield Text(str(one.totals.casts) if one.totals.casts else "-")
    yield Text(in_bytes(one.totals.bytes_given))


def _shortened(dtypes: str) -> str:
    return " + ".join(short(dtype) for dtype in dtypes.split(" + "))


def _largest_of(numbers: Iterable[Numbers]) -> Text:
    known = [*numbers]
    return _largest(Numbers.merge(known) if known else None)


# Tables


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )


def _with_rest(table: RenderableType, left: int, what: str) -> RenderableType:
    return Group(table, Text(f"... and {left} more {what}", style="dim")) if left > 0 else table
