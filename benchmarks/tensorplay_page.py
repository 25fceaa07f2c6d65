"""Measures the cases of TensorPlay, where it is installed, and shows them on a page of their own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from typing import TYPE_CHECKING, Any

from benchmarks.cases import is_named
from benchmarks.rounds import WorkerFailedError, measure
from benchmarks.table import Page, Row, describe_machine, markdown, rich_table, to_row
from benchmarks.tensorplay_cases import TENSORPLAY_CASES, TensorplayCase

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from benchmarks.rounds import Plan

# All cases in five minutes.
SETS = 2
BUDGET = 3.5

PAGE = Page(
    "tensorplay-cpu",
    "mezzo.tensorplay against TensorPlay's own autocast",
    (
        "Medians over paired rounds, with 95% bootstrap intervals; differences are medians of paired differences. Each side",
        "runs in a process of its own and only one computes at a time; the control is a second process of TensorPlay alone,",
        "held against the first. Both sides compute in bfloat16, in a region with the policy that each has by default.",
        "",
        "A layer is timed forward in a new region, and backward outside of it; gradients are dropped before. Under native",
        "autocast the layer norm reads its float32 weight as if it were bfloat16: what it computes is garbage, but its time",
        "is counted. mezzo's norms are right, and run in float32. So there is a row against native autocast with norms that",
        'do `x.float()` ("by hand"), and one against float32 without autocast; no bound was asked on those, nor on the',
        "small layer.",
        "",
        "Calls have 8 x 8 operands, where dispatch is what one sees: 4 us over native autocast for a call and 4 us for each",
        "cast in it. Casts are counted as mezzo makes them; native autocast keeps that of a weight for the region, at the",
        "price of lost gradients. Outside of regions mezzo's process has been through one before it is timed; 1.02 is 1.00",
        "within what two processes differ by. No bound was asked on entering a region, nor on unlisted ops inside of one.",
    ),
    ("mezzo", "TensorPlay"),
)


def select_tensorplay(names: Sequence[str]) -> list[TensorplayCase]:
    """The cases whose names are, or begin with the words of, one of ``names``; all of them for no names."""
    return [case for case in TENSORPLAY_CASES if not names or any(is_named(case, name) for name in names)]


def measure_tensorplay(
    cases: Sequence[TensorplayCase], plan: Plan, sets: int | None, console: Console, target: Path | None
) -> bool:
    """Measure, show, write down where told.

    Returns:
        Whether all could be measured. Nothing is where TensorPlay is not installed, and that is no failure.
    """
    if not cases:
        return True
    if importlib.util.find_spec("tensorplay") is None:
        console.print("The cases of TensorPlay are left out: it is not installed.")
        return True
    plan = plan_of(plan, sets)
    rows = [row for case in cases if (row := _measure(case, plan, console))]
    if rows:
        _show(rows, plan, console, target)
    return len(rows) == len(cases)


def plan_of(plan: Plan, sets: int | None) -> Plan:
    """What is done of a plan: fewer processes, unless they were asked for, and fewer rounds."""
    return dataclasses.replace(plan, process_sets=sets or min(SETS, plan.process_sets), budget=min(BUDGET, plan.budget))


def _measure(case: TensorplayCase, plan: Plan, console: Console) -> Row | None:
    try:
        row = to_row(case, measure(case, plan))
    except WorkerFailedError as error:
        console.print(f"{case.name}: {error}", markup=False, style="red")
        return None
    console.print(f"{case.name}: {row.cells()[3]} {row.verdict}", markup=False, highlight=False)
    return row


def _show(rows: Sequence[Row], plan: Plan, console: Console, target: Path | None) -> None:
    machine = machine_of(rows, plan)
    console.print(rich_table(rows, machine, PAGE))
    if target is None:
        return
    target.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, "rows": [row.record() for row in rows]}
    (target / f"{PAGE.stem}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (target / f"{PAGE.stem}.md").write_text(markdown(rows, machine, PAGE), encoding="utf-8")
    console.print(f"Written to {target / PAGE.stem}.md and .json")


def machine_of(rows: Sequence[Row], plan: Plan) -> dict[str, Any]:
    """What the numbers depend on: TensorPlay, and not PyTorch."""
    described = describe_machine(rows, plan)
    return {"tensorplay" if name == "torch" else name: value for name, value in described.items()}
