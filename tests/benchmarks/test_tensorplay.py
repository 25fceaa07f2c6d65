"""The TensorPlay benchmarks: that both sides do the same work, each in a process of its own, and that a page is written."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("rich")

from benchmarks.cases import CASES, select
from benchmarks.jax_cases import JAX_CASES
from benchmarks.rounds import QUICK, Plan, Worker, WorkerFailedError
from benchmarks.tensorplay_cases import TENSORPLAY_CASES, tensorplay_case_named
from benchmarks.tensorplay_page import measure_tensorplay, plan_of, select_tensorplay
from rich.console import Console

if TYPE_CHECKING:
    from benchmarks.pairing import Side

needs_tensorplay = pytest.mark.skipif(
    importlib.util.find_spec("tensorplay") is None,
    reason="TensorPlay is not installed; it has wheels for Linux on x86_64 with glibc 2.35 or newer",
)
ROOT = Path(__file__).resolve().parents[2]
SIDES: tuple[Side, ...] = ("mezzo", "torch")


def answer(worker: Worker, case: str, side: Side) -> dict[str, Any]:
    worker.tell({"case": case, "side": side, "clock": "cpu"})
    return worker.hear()


@needs_tensorplay
def test_both_sides_of_every_case_do_the_same_work() -> None:
    """The dtype of what they compute, and its mean square to 1 %: bfloat16 has 8 bits."""
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(Worker(side, TENSORPLAY_CASES[0].worker))) for side in SIDES]
        for case in TENSORPLAY_CASES:
            mezzo, native = (answer(worker, case.name, worker.side) for worker in workers)
            assert mezzo["probe"][0] == native["probe"][0], case.name
            assert mezzo["probe"][1] == pytest.approx(native["probe"][1], rel=1e-2, abs=1e-6), case.name
            assert native["torch"].startswith("1.0.")
            assert (mezzo["threads"], native["threads"]) == (1, 1)
            if not case.name.startswith("tensorplay-layer-256"):
                assert all(worker.run(2) > 0.0 for worker in workers), case.name


@needs_tensorplay
def test_a_rival_that_has_mezzo_loaded_is_refused() -> None:
    with closing(Worker("torch", TENSORPLAY_CASES[0].worker)) as worker:
        answer(worker, "tensorplay-outside-add", "mezzo")
        with pytest.raises(WorkerFailedError, match="the side of native autocast has mezzo loaded"):
            answer(worker, "tensorplay-outside-add", "torch")


@needs_tensorplay
def test_the_cases_have_a_page_of_their_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--case", "tensorplay-call-mm-low"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tensorplay-cpu.json", "tensorplay-cpu.md"]
    record = json.loads((tmp_path / "tensorplay-cpu.json").read_text(encoding="utf-8"))
    assert record["machine"]["tensorplay"].startswith("1.0.")
    assert "torch" not in record["machine"]
    (row,) = record["rows"]
    assert (row["name"], row["kind"], row["bound"]) == ("tensorplay-call-mm-low", "difference", 4e-6)
    assert all(seconds > 0.0 for group in row["rounds"] for one in group for seconds in one)
    page = (tmp_path / "tensorplay-cpu.md").read_text(encoding="utf-8")
    assert page.startswith("# mezzo.tensorplay against TensorPlay's own autocast\n")
    assert "| case | mezzo | TensorPlay | ratio or difference | control | bound | verdict |" in page


def test_without_tensorplay_the_cases_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorplay", None)  # then it cannot be imported
    console = Console(record=True, width=120)
    assert measure_tensorplay(TENSORPLAY_CASES, QUICK, None, console, tmp_path)
    assert "The cases of TensorPlay are left out: it is not installed." in console.export_text()
    assert list(tmp_path.iterdir()) == []


def test_the_bounds_are_those_that_were_promised() -> None:
    """1.10 on the layer, 4 us on a call and 4 more on each of its casts; 1.02 is 1.00 within noise."""
    bounds = {case.name.removeprefix("tensorplay-"): case.bound for case in TENSORPLAY_CASES if case.bound is not None}
    assert bounds["layer-256-native"] == 1.10
    casts = {"mm-low": 0, "mm-leaf": 1, "mm-activations": 2, "linear": 2, "prod": 1, "mse-loss": 2, "layer-norm": 1}
    for call, number in casts.items():
        assert bounds[f"call-{call}"] == pytest.approx(4e-6 * (1 + number)), call
    assert {bound for name, bound in bounds.items() if name.startswith("outside-")} == {1.02}


def test_names_select_the_cases_of_tensorplay_and_no_others() -> None:
    assert select(["tensorplay"]) == []
    assert select_tensorplay(["tensorplay"]) == select_tensorplay([]) == list(TENSORPLAY_CASES)
    assert select_tensorplay(["tensorplay-call-mm"]) == [
        tensorplay_case_named(f"tensorplay-call-mm-{which}") for which in ("low", "leaf", "activations")
    ]
    assert select_tensorplay(["op-mm"]) == []
    names = [case.name for case in (*CASES, *JAX_CASES, *TENSORPLAY_CASES)]
    assert len(names) == len(set(names))


def test_sets_are_two_unless_they_were_asked_for() -> None:
    assert (plan_of(Plan(), None).process_sets, plan_of(Plan(), 4).process_sets, plan_of(QUICK, None).process_sets) == (
        2,
        4,
        1,
    )
    assert plan_of(Plan(budget=8.0), None).budget == 3.5
    assert plan_of(QUICK, None).budget == QUICK.budget
