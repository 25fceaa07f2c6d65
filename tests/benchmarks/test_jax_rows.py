"""The tables of the JAX benchmarks, on numbers whose verdicts are known, and how the command finds its cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from benchmarks.cases import CASES, select
from benchmarks.jax_cases import AROUND, CONTROL, HAND, JAX_CASES, MEZZO, TITLES
from benchmarks.jax_page import markdown, plan_of, select_jax, sheets
from benchmarks.jax_rows import (
    FACT_COLUMNS,
    TIME_COLUMNS,
    JaxMeasurement,
    above,
    against,
    fact_cells,
    middle,
    time_cells,
)
from benchmarks.rounds import QUICK, Plan

ROOT = Path(__file__).resolve().parents[2]


def facts_of(**changed: Any) -> dict[str, Any]:
    facts = {"residual_bytes": 2**20, "temporary_bytes": 2**21, "errors": [0.01, 0.02], "converts": 3, "equations": 9}
    return {**facts, "low_products": 4, "products": 4, **changed}


def measured(mezzo: float = 1.0, build: float = 1.0, **changed: Any) -> JaxMeasurement:
    """Two processes of three rounds each, mezzo taking ``mezzo`` and ``build`` times as long as by hand."""
    found = JaxMeasurement(JAX_CASES[0])
    facts = {HAND: facts_of(), CONTROL: facts_of(), MEZZO: facts_of(**changed)}
    facts["jaxamp"] = {"failed": "ValueError: too many values"}
    for speed in (1.0, 1.5):
        runs = [{HAND: speed, CONTROL: speed, MEZZO: mezzo * speed} for _ in range(3)]
        builds = [{HAND: [0.1, 0.1, 0.8], CONTROL: [0.1, 0.1, 0.8], MEZZO: [0.1 * build, 0.1 * build, 0.8 * build]}]
        found.add({"facts": facts, "runs": runs, "builds": builds, "versions": {"jax": "0.10.2"}})
    return found


def test_ratios_are_taken_within_a_round() -> None:
    groups = [[{HAND: 2.0, MEZZO: 3.0}, {HAND: 4.0, MEZZO: 6.0}]]
    assert against(groups, MEZZO).median == 1.5
    assert above(groups, MEZZO).median == 1.5
    assert against([[{HAND: 1.0, "float32": 4.0, MEZZO: 2.0}]], MEZZO, "float32").median == 0.5


@pytest.mark.parametrize(("ratio", "verdict"), [(0.9, "met"), (1.05, "met"), (1.06, "not met")])
def test_a_step_may_take_a_twentieth_longer(ratio: float, verdict: str) -> None:
    cells = dict(zip(TIME_COLUMNS[1:], time_cells(measured(ratio), MEZZO), strict=True))
    assert cells["bound 1.05"] == verdict
    assert cells["bound 1.1"] == "met"


@pytest.mark.parametrize(("ratio", "verdict"), [(1.09, "met"), (1.11, "not met")])
def test_building_may_take_a_tenth_longer(ratio: float, verdict: str) -> None:
    cells = list(time_cells(measured(build=ratio), MEZZO))
    assert cells[TIME_COLUMNS.index("bound 1.1") - 1] == verdict
    assert cells[-1] == f"{(ratio - 1.0) * 100:+.1f} ms"


def test_a_control_that_strays_leaves_no_verdict() -> None:
    found = measured()
    for group in found.runs:
        for index, one in enumerate(group):
            one[CONTROL] *= (0.9, 1.0, 1.1)[index]
    assert list(time_cells(found, MEZZO))[2] == "control wider than the bound"


@pytest.mark.parametrize(
    ("changed", "column", "verdict"),
    [
        ({}, "not more than by hand", "met"),
        ({"residual_bytes": 2**20 - 1}, "not more than by hand", "met"),
        ({"residual_bytes": 2**20 + 1}, "not more than by hand", "not met"),
        ({"residual_bytes": None}, "not more than by hand", "-"),
        ({"errors": [0.01004, 0.02008]}, "not above by hand", "met"),
        ({"errors": [0.0101, 0.0202]}, "not above by hand", "not met"),
    ],
)
def test_bytes_and_errors_are_held_against_those_by_hand(changed: dict[str, Any], column: str, verdict: str) -> None:
    cells = dict(zip(FACT_COLUMNS[1:], list(fact_cells(measured(**changed), MEZZO)), strict=False))
    assert cells["bfloat16 products"] == "4 of 4"
    assert list(fact_cells(measured(**changed), MEZZO))[FACT_COLUMNS.index(column) - 1] == verdict


def test_what_is_not_mezzo_is_not_judged() -> None:
    for cells in (list(time_cells(measured(), CONTROL)), list(fact_cells(measured(), CONTROL))):
        assert not {"met", "not met"}.intersection(cells)


def test_a_way_that_failed_is_a_row_that_says_why() -> None:
    page = markdown([measured()], {"processor": "Example 9000", "jax": "0.10.2"})
    assert "processor Example 9000; jax 0.10.2." in page
    assert f"## {JAX_CASES[0].name}: {JAX_CASES[0].title}" in page
    assert "| jaxamp, amp | ValueError: too many values |" in page
    assert page.count("| jaxamp") == 1
    assert page.count(f"| {TITLES[MEZZO]} |") == 2
    assert TITLES[AROUND] not in page


def test_every_row_is_as_wide_as_its_head() -> None:
    for columns, rows in sheets(measured()):
        assert {len(row) for row in rows} == {len(columns)}


def test_names_of_jax_select_cases_of_jax_alone() -> None:
    assert select(["jax"]) == []
    assert select_jax(["jax"]) == list(JAX_CASES)
    assert [case.name for case in select_jax(["jax-mlp", "op-mm"])] == ["jax-mlp"]
    assert (select([]), select_jax([])) == (list(CASES), list(JAX_CASES))
    with pytest.raises(ValueError, match=r"no case is called jax-mpl; .*jax-mlp"):
        select(["jax-mpl"])


def test_the_first_process_does_all_and_a_quick_run_builds_once() -> None:
    full, quick = plan_of(Plan(), first=True), plan_of(QUICK, first=True)
    assert (full.builds, full.seeds, full.everything) == (3, 5, True)
    assert (quick.builds, quick.seeds, quick.everything) == (1, 1, True)
    assert not plan_of(Plan(), first=False).everything


def test_a_way_may_be_missing_in_further_processes() -> None:
    groups = [[{HAND: 2.0, "jmp": 3.0}], [{HAND: 9.0}]]
    assert (against(groups, "jmp").median, above(groups, "jmp").median, middle(groups, "jmp")) == (1.5, 1.0, 3.0)


def test_the_command_leaves_jax_out_where_it_is_not_installed() -> None:
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from benchmarks.__main__ import main\n"
        "sys.exit(main(['--quick', '--case', 'jax']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "The cases of JAX are left out: it is not installed." in done.stdout


def test_the_command_writes_a_page_of_its_own(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    command = [sys.executable, "-m", "benchmarks", "--quick", "--case", "jax-call", "--output", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jax-cpu.json", "jax-cpu.md"]
    record = json.loads((tmp_path / "jax-cpu.json").read_text(encoding="utf-8"))
    assert record["machine"]["jax"] == jax.__version__
    assert [case["name"] for case in record["cases"]] == ["jax-call"]
    page = (tmp_path / "jax-cpu.md").read_text(encoding="utf-8")
    assert page.startswith("# mezzo.jax.autocast against bfloat16 written by hand\n")
    assert page.count("\n| not jitted | ") == 1
