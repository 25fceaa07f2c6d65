"""The benchmarks of what watches: that all sides do the same work, and that the tools see it whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.cases import select
from benchmarks.rounds import Plan
from benchmarks.table import WATCHED, page_of

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ["explain", "numerics", "shadow", "find"]


def small_model() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)), torch.randn(3, 8)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_watched_step_computes_what_an_unwatched_one_does(tool: str) -> None:
    """To the last bit: nothing of a run changes because somebody looks on."""
    from benchmarks.watched import WATCHES, training_work

    model, inputs = small_model()
    dtype, value = training_work(model, inputs).probe()
    assert training_work(model, inputs, WATCHES[tool]).probe() == (dtype, value)
    assert dtype == "torch.float32"
    assert value > 1e-4


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_sees_no_backward_pass_fails(tool: str) -> None:
    from benchmarks.watched import WATCHES, check

    model, _ = small_model()
    with WATCHES[tool](model) as watched:
        pass
    with pytest.raises(RuntimeError, match="the step was not watched to its end:"):
        check(watched)


def test_a_search_that_ended_early_fails() -> None:
    from benchmarks.watched import WATCHES, training_work

    model, inputs = small_model()
    with pytest.raises(RuntimeError, match="the step was not watched to its end:"):
        training_work(model, inputs * float("inf"), WATCHES["find"]).probe()


@pytest.mark.parametrize("name", ["watched-overflow-small-unscale", "watched-history-small-step"])
def test_a_scaler_with_a_tool_steps_as_one_without(name: str) -> None:
    from benchmarks.steps import _parameters
    from benchmarks.watched import watched_work

    (case,) = select([name])
    found = []
    for side in ("mezzo", "torch"):
        work = watched_work(case, side)
        with torch.no_grad():
            _parameters("small")[0].zero_()  # the probe is how far it moves, which is rounded as it is
        found.append(work.probe())
    assert found[0] == found[1]


def test_what_tools_leave_behind_changes_no_number() -> None:
    from benchmarks.watched import watched_work

    (case,) = select(["watched-before-blocks"])
    # The side that never used one first: this is one process, where the benchmark has one for each.
    without, with_them = watched_work(case, "torch").probe(), watched_work(case, "mezzo").probe()
    assert without == with_them


def test_recording_may_double_the_time_and_what_does_not_watch_costs_nothing() -> None:
    cases = select(["watched"])
    assert {case.subject: case.bound for case in cases} == {
        "explain-encoder-1x32": 2.0,
        "explain-encoder-4x128": 2.0,
        "find-encoder-1x32": 1.5,
        "find-encoder-4x128": 1.5,
        "numerics-encoder-1x32": None,
        "shadow-encoder-1x32": None,
        "overflow-small-unscale": 1.02,
        "history-small-step": 1.05,
        "before-blocks": 1.02,
    }
    assert [case.subject for case in cases if not case.together] == ["before-blocks"]
    assert all(case.rival_loads_mezzo and page_of(case) is WATCHED for case in cases)
    assert all("recording" in case.title for case in cases if "explain()" in case.title)


def test_long_steps_with_wide_bounds_get_few_rounds() -> None:
    plan = Plan(rounds=40, least_rounds=12, budget=6.0)
    assert [plan.rounds_for(0.01, most) for most in (None, 5, 50)] == [40, 5, 40]
    assert plan.rounds_for(5.0, 5) == 5
    few = {case.subject: case.most_rounds for case in select(["watched"]) if case.most_rounds is not None}
    assert {name: few[name] for name in ("shadow-encoder-1x32", "find-encoder-4x128")} == {
        "shadow-encoder-1x32": 5,
        "find-encoder-4x128": 3,
    }
    assert all("encoder" in name for name in few)
    assert {case.most_rounds for case in select([]) if "watched" not in case.name} == {None}


def test_they_have_a_page_of_their_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--case", "watched-history", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["watched-cpu.json", "watched-cpu.md"]
    (row,) = json.loads((tmp_path / "watched-cpu.json").read_text(encoding="utf-8"))["rows"]
    assert (row["name"], row["bound"], row["together"]) == ("watched-history-small-step", 1.05, True)
    page = (tmp_path / "watched-cpu.md").read_text(encoding="utf-8")
    assert page.startswith("# What it costs to watch: ")
    assert "| case | with | without | ratio or difference |" in page
