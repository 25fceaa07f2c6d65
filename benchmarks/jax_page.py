"""Measures the cases of JAX, each in processes of its own, and shows them on a page of tables."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from benchmarks.cases import is_named
from benchmarks.jax_cases import BUILD_BOUND, ERROR_BOUND, JAX_CASES, RUN_BOUND, TITLES, JaxCase, JaxPlan
from benchmarks.jax_rows import (
    CALL_COLUMNS,
    FACT_COLUMNS,
    TIME_COLUMNS,
    JaxMeasurement,
    call_rows,
    fact_cells,
    time_cells,
)
from benchmarks.rounds import ROOT
from benchmarks.table import processor_name, today

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from benchmarks.rounds import Plan

STEM = "jax-cpu"
TITLE = "mezzo.jax.autocast against bfloat16 written by hand"
# Compiling takes its time; two processes are what ten minutes have room for.
SETS = 2
# No case takes longer; a process that hangs must not hold up the rest.
SECONDS = 900.0
NOTES = (
    "Loss and gradients of all parameters, jitted. All ways take turns in one process, on one core; times are medians, and",
    "those against bfloat16 by hand medians of ratios within a round, with 95% bootstrap intervals. The control is the same",
    "function by hand, compiled once more and held against the first: a bound is judged where the control is narrower. Ways",
    "without a bound are measured in the first process only.",
    "",
    '"By hand" is what a careful person writes: products, biases and activations in bfloat16, norms, softmax and losses in',
    "float32, the weights cast where they are used. All other ways are given the float32 model. jmp casts parameters and",
    "inputs to bfloat16, and the loss back; once with norms that compute in what comes, once with norms that compute in",
    "float32 and return it, which in float32 is the same program. mpx casts as jmp does, the gradients being `equinox`'s.",
    "",
    '"Trace, lower, compile" is `jax.jit(f).lower(...).compile()` of a function made anew, after `jax.clear_caches()`;',
    '"trace" is the part of it that a rewrite adds to. "Kept for backward" are the bytes that `jax.vjp` keeps, parameters',
    "among them; where the way is around the gradient there is no such function. Temporaries are what XLA says that the",
    "program needs beside its arguments and results. Errors of gradients are relative to float32, all parameters as one",
    "vector: medians over seeds of parameters and data, ratios with the least and the largest. Casts are",
    "`convert_element_type` equations between floats whose results are used; XLA removes some and adds others.",
    "",
    f"Bounds on mezzo: {RUN_BOUND:g} on a step, {BUILD_BOUND:g} on what comes before it, no byte more than by hand, and",
    f"errors not above those by hand; there medians of ratios up to {ERROR_BOUND:g} count as equal: sums differ in order.",
)


class Sheet(NamedTuple):
    """A table, for the terminal or for Markdown."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def select_jax(names: Sequence[str]) -> list[JaxCase]:
    """The cases whose names are, or begin with the words of, one of ``names``; all of them for no names."""
    return [case for case in JAX_CASES if not names or any(is_named(case, name) for name in names)]


def measure_jax(cases: Sequence[JaxCase], plan: Plan, sets: int | None, console: Console, target: Path | None) -> bool:
    """Measure, show, write down where told.

    Returns:
        Whether all could be measured. Nothing is where JAX is not installed, and that is no failure.
    """
    if not cases:
        return True
    if importlib.util.find_spec("jax") is None:
        console.print("The cases of JAX are left out: it is not installed.")
        return True
    done = [found for case in cases if (found := _measure(case, plan, sets or min(SETS, plan.process_sets), console))]
    if done:
        _show(done, plan, console, target)
    return len(done) == len(cases)


def plan_of(plan: Plan, *, first: bool) -> JaxPlan:
    """What one process does of a plan; the first does all, and further ones what bounds are on."""
    return JaxPlan(
        rounds=plan.rounds,
        least_rounds=plan.least_rounds,
        budget=plan.budget,
        warmup=plan.warmup,
        seconds=plan.seconds,
        builds=max(1, plan.least_rounds // 4),
        seeds=max(1, plan.least_rounds // 2 - 1),
        everything=first,
        clock=plan.clock,
    )


def _measure(case: JaxCase, plan: Plan, sets: int, console: Console) -> JaxMeasurement | None:
    found, start = JaxMeasurement(case), time.monotonic()
    for index in range(sets):
        inner = json.dumps(dataclasses.asdict(plan_of(plan, first=index == 0)))
        command = [sys.executable, "-m", "benchmarks.jax_worker", case.model, inner]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode != 0:
            console.print(f"{case.name}: the worker failed\n{done.stderr}", markup=False, style="red")
            return None
        # Only the last line: a library may print too.
        found.add(json.loads(done.stdout.splitlines()[-1]))
    console.print(f"{case.name}: measured in {sets} x {(time.monotonic() - start) / sets:.0f} s")
    return found


def _show(done: Sequence[JaxMeasurement], plan: Plan, console: Console, target: Path | None) -> None:
    machine = describe(done, plan)
    for found in done:
        for sheet in sheets(found):
            console.print(_rich_table(f"{found.case.name}: {found.case.title}", sheet))
    if target is None:
        return
    target.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, "cases": [found.record() for found in done]}
    (target / f"{STEM}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (target / f"{STEM}.md").write_text(markdown(done, machine), encoding="utf-8")
    console.print(f"Written to {target / STEM}.md and .json")


def describe(done: Sequence[JaxMeasurement], plan: Plan) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "processor": processor_name(),
        **done[0].versions,
        "python": sys.version.split()[0],
        "threads": 1,
        "clock": plan.clock,
        "processes": f"{len(done[0].runs)} for each model",
        "rounds": f"{plan.least_rounds} to {plan.rounds}, {plan_of(plan, first=True).builds} of compiling",
        "seeds": plan_of(plan, first=True).seeds,
        "date": today(),
    }


def sheets(found: JaxMeasurement) -> list[Sheet]:
    """The tables of a case."""
    if not found.facts:
        return [Sheet(CALL_COLUMNS, list(call_rows(found)))]
    ways = {way: title for way, title in TITLES.items() if way in found.facts and "failed" not in found.facts[way]}
    return [
        Sheet(TIME_COLUMNS, [(title, *time_cells(found, way)) for way, title in ways.items()]),
        Sheet(FACT_COLUMNS, [(title, *fact_cells(found, way)) for way, title in ways.items() if way != "control"]),
        *_failures(found),
    ]


def _failures(found: JaxMeasurement) -> Iterator[Sheet]:
    failed = [(TITLES[way], facts["failed"]) for way, facts in found.facts.items() if "failed" in facts]
    if failed:
        yield Sheet(("way", "why there is no number of it"), failed)


def _rich_table(title: str, sheet: Sheet) -> Table:
    table = Table(title=title)
    for column in sheet.columns:
        is_first = column == sheet.columns[0]
        table.add_column(column, justify="left" if is_first else "right", no_wrap=is_first)
    for row in sheet.rows:
        table.add_row(*row)
    return table


def markdown(done: Sequence[JaxMeasurement], machine: dict[str, Any]) -> str:
    """The page."""
    lines = [f"# {TITLE}", "", "; ".join(f"{name} {value}" for name, value in machine.items()) + ".", "", *NOTES]
    for found in done:
        lines += ["", f"## {found.case.name}: {found.case.title}"]
        for sheet in sheets(found):
            lines += ["", _line(sheet.columns), "|" + " --- |" * len(sheet.columns), *map(_line, sheet.rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
