"""The benchmark command, its cases and its workers, in a few short rounds: that it works, not what it measures."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.cases import CASES, select
from benchmarks.rounds import Plan, Worker, WorkerFailedError
from benchmarks.table import processor_name

pytest.importorskip("torch")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[2]


def run_benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_quick_run_prints_a_table_and_writes_it_down(tmp_path):
    done = run_benchmarks("--quick", "--case", "enter-again-torch", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "autocast-cpu.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in record["rows"]] == ["enter-again-torch"]
    assert record["machine"]["threads"] == 1
    for row in record["rows"]:
        assert row["bound"] == 2.0
        assert row["measured"]["low"] <= row["measured"]["median"] <= row["measured"]["high"]
        assert all(seconds > 0 for group in row["rounds"] for one in group for seconds in one)
    page = (tmp_path / "autocast-cpu.md").read_text(encoding="utf-8")
    assert page.count("| enter-again-torch: ") == 1
    assert "enter-again-torch" in done.stdout


def test_the_scaler_has_a_page_of_its_own(tmp_path):
    done = run_benchmarks("--quick", "--case", "scaler-small-unscale", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scaler-cpu.json", "scaler-cpu.md"]
    (row,) = json.loads((tmp_path / "scaler-cpu.json").read_text(encoding="utf-8"))["rows"]
    assert (row["name"], row["bound"], row["together"]) == ("scaler-small-unscale", 1.05, True)
    page = (tmp_path / "scaler-cpu.md").read_text(encoding="utf-8")
    assert page.startswith("# mezzo.torch.GradScaler against torch.amp.GradScaler\n")
    assert "torch.autocast" not in page


def test_gradients_are_put_right_before_each_iteration_of_a_scaler_and_the_clock_stands_still():
    from benchmarks.work import Work
    from benchmarks.worker import _timed

    now, done = [0.0], []

    def between():
        done.append("between")
        now[0] += 100.0

    def loop(count):
        done.append(count)
        now[0] += 1.0

    work = Work(loop, lambda: ("torch.float32", 1.0), between)
    assert _timed(work, 3, lambda: now[0]) == 3.0
    assert done == ["between", 1] * 3


@pytest.mark.parametrize("case", select(["scaler-small"]), ids=lambda case: case.name)
def test_what_a_scaler_is_timed_on_stays_the_same(case):
    """An iteration starts from gradients of 1.5 times the scale, and the scale never moves."""
    import torch
    from benchmarks.steps import _parameters, scaler_work

    work = scaler_work(case, "torch")
    weight = _parameters("small")[0]
    with torch.no_grad():
        weight.zero_()
    for _ in range(3):
        work.between()
        assert weight.grad.unique().tolist() == [1.5 * 2.0**16]
        work.loop(1)
        assert weight.grad.unique().tolist() == [1.5]
    assert 0.0 < weight.abs().max() < 1e-5


def test_a_case_nobody_knows_is_a_wrong_call():
    done = run_benchmarks("--case", "convolutoin")
    assert done.returncode == 2
    assert "no case is called convolutoin" in done.stderr


def test_a_worker_that_fails_says_why():
    worker = Worker("torch")
    try:
        worker.tell({"case": "no such case", "side": "torch", "clock": "wall"})
        with pytest.raises(WorkerFailedError, match="side 'torch' raised"):
            worker.hear()
    finally:
        worker.close()


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not any(word in case.name for word in ("encoder", "large", "prepare", "apex"))],
    ids=lambda case: case.name,
)
def test_every_case_has_a_torch_side(case):
    from benchmarks.workloads import build

    work = build(case, "torch")
    work.loop(2)
    dtype, value = work.probe()
    assert dtype.startswith("torch.")
    assert math.isfinite(value)
    assert value > 0


def test_names_select_whole_words():
    assert [case.name for case in select(["op-mm"])] == ["op-mm"]
    assert {case.workload for case in select(["model", "registered"])} == {"model"}
    assert select([]) == list(CASES)
    with pytest.raises(ValueError, match="no case is called op-m;"):
        select(["op-m"])


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


def test_long_work_gets_fewer_rounds_but_never_less_than_the_least():
    plan = Plan(rounds=40, least_rounds=12, budget=6.0)
    assert plan.rounds_for(0.01) == 40
    assert plan.rounds_for(0.125) == 16
    assert plan.rounds_for(5.0) == 12


def test_the_processor_is_read_from_cpuinfo(tmp_path):
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nmodel name\t: Example 9000\nflags\t\t: fpu\n", encoding="utf-8")
    assert processor_name(listing) == "Example 9000"
