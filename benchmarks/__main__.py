"""The command: ``python -m benchmarks``, from the repository root."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.cases import Case, select
from benchmarks.jax_page import measure_jax, select_jax
from benchmarks.rounds import QUICK, ROOT, Plan, WorkerFailedError, measure
from benchmarks.table import PAGES, Page, Row, describe_machine, markdown, page_of, rich_table, to_row
from benchmarks.tensorplay_page import measure_tensorplay, select_tensorplay

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = ROOT / "benchmarks" / "results"

# A narrower table would break its numbers; a pipe has no width of its own.
MINIMAL_WIDTH = 170


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write it down.

    Returns:
        0 whatever the verdicts are, 1 when a worker failed, 2 for a wrong call.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        cases = select(options.case)
    except ValueError as error:
        parser.error(str(error))
    plan = _plan(options)
    console = Console()
    console = console if console.width >= MINIMAL_WIDTH else Console(width=MINIMAL_WIDTH)
    rows, failures = _measure_all(cases, plan, console)
    for page in PAGES:
        if on_page := [row for row in rows if page_of(row.case) is page]:
            _show(on_page, plan, page, console, _target(options))
    target = _target(options)
    measured = [
        measure_jax(select_jax(options.case), plan, options.sets, console, target),
        measure_tensorplay(select_tensorplay(options.case), plan, options.sets, console, target),
    ]
    return 1 if failures or not all(measured) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Time mezzo against PyTorch.")
    parser.add_argument("--quick", action="store_true", help="a few short rounds: a smoke test, not a measurement")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help="only this case, or the cases whose names begin with these words (may be repeated)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where to write the results; a full run writes to benchmarks/results, others only where told",
    )
    parser.add_argument("--sets", type=int, metavar="N", help="how often fresh processes are started for a case")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="time that passes, or processor time alone for a machine that is busy otherwise",
    )
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    plan = dataclasses.replace(QUICK if options.quick else Plan(), clock=options.clock)
    return plan if options.sets is None else dataclasses.replace(plan, process_sets=max(1, options.sets))


def _measure_all(cases: Sequence[Case], plan: Plan, console: Console) -> tuple[list[Row], list[str]]:
    rows, failures = [], []
    for case in cases:
        try:
            row = to_row(case, measure(case, plan))
        except WorkerFailedError as error:
            failures.append(case.name)
            console.print(f"{case.name}: {error}", markup=False, style="red")
            continue
        rows.append(row)
        console.print(f"{case.name}: {row.cells()[3]} {row.verdict}", markup=False, highlight=False)
    return rows, failures


def _target(options: argparse.Namespace) -> Path | None:
    """Where results go; a partial or hasty run must not overwrite those of a full one."""
    if options.output is not None:
        return Path(options.output)
    return None if options.quick or options.case else RESULTS


def _show(rows: Sequence[Row], plan: Plan, page: Page, console: Console, target: Path | None) -> None:
    machine = describe_machine(rows, plan)
    console.print(rich_table(rows, machine, page))
    if target is None:
        return
    target.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, "rows": [row.record() for row in rows]}
    (target / f"{page.stem}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (target / f"{page.stem}.md").write_text(markdown(rows, machine, page), encoding="utf-8")
    console.print(f"Written to {target / page.stem}.md and .json")


if __name__ == "__main__":
    sys.exit(main())
