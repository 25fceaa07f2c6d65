"""The benchmarks of the front for Apex: that both sides do the same work, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.cases import Case, select
from benchmarks.pairing import Side

from tests.programs import run_python

pytest.importorskip("torch")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[2]
CASES = select(["apex"])


def probed(case: Case) -> list[tuple[str, float]]:
    """Ask a worker of each side what it computes, and let it run once."""
    sides: tuple[Side, ...] = ("mezzo", "torch")
    found = []
    for side in sides:
        requests = ({"case": case.name, "side": side, "clock": "wall"}, {"run": 1, "side": side})
        lines = "".join(f"{json.dumps(request)}\n" for request in requests)
        done = run_python(["-m", "benchmarks.worker"], ROOT, text=lines)
        assert done.returncode == 0, done.stderr
        built, ran = map(json.loads, done.stdout.splitlines())
        found.append(tuple(built["probe"]))
        assert ran["seconds"] > 0.0
    return found


@pytest.mark.parametrize(
    "name",
    [
        "apex-O0-many-sgd-none",
        "apex-O1-tiny-sgd-unscale",
        "apex-O1-mlp-sgd-delayed",
        "apex-O2-tiny-sgd-unscale",
        "apex-O1-many-fused-step",
    ],
)
def test_the_front_trains_as_plain_mezzo_does(name: str) -> None:
    """To the last bit: the same kernels run on the same numbers, and scales are powers of two."""
    (case,) = select([name])
    (dtype, value), other = probed(case)
    assert (dtype, value) == other
    assert dtype == "torch.float32"
    assert value > 1e-4


def test_the_probe_sees_a_step_left_out() -> None:
    """Plain PyTorch's side, which leaves nothing behind in this process."""
    import torch
    from benchmarks.apex_front import Training, Way

    torch.manual_seed(0)
    training = Training(Way("O0", "tiny", "sgd", "none"), "torch")
    training.gradients()
    squares = sum(each.grad.square().sum().item() for each in training.net.model.parameters())
    training.net.optimizer.zero_grad()
    # SGD moves by the gradient times the rate. Weights of 0.1 are rounded by 1e-8, a percent of a move of 1e-6.
    assert -training.descent().item() == pytest.approx(squares, rel=1e-2)
    training.side.update = lambda: None
    assert training.descent().item() == 0.0


def test_every_block_of_a_step_is_counted() -> None:
    from benchmarks.apex_front import BLOCKS, Way

    passes = {case.subject.split("-")[-1]: Way(*case.subject.split("-")).passes for case in CASES}
    assert passes == {"unscale": 1, "step": 1, "none": 1, "delayed": BLOCKS, "blocks": BLOCKS}


def test_the_bound_is_three_percent_but_where_each_block_unscales() -> None:
    assert {case.bound for case in CASES if not case.name.endswith("blocks")} == {1.03}
    assert [case.name for case in CASES if case.bound is None] == ["apex-O1-mlp-sgd-blocks"]


def test_the_many_parameters_are_three_hundred() -> None:
    from benchmarks.apex_front import NETS

    counts = {name: len(list(make()[0].parameters())) for name, make in NETS.items()}
    assert counts == {"tiny": 6, "mlp": 12, "many": 300}


def test_the_front_has_a_page_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--case", "apex-O1-tiny-sgd-unscale"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["apex-cpu.json", "apex-cpu.md"]
    (row,) = json.loads((tmp_path / "apex-cpu.json").read_text(encoding="utf-8"))["rows"]
    assert (row["name"], row["bound"]) == ("apex-O1-tiny-sgd-unscale", 1.03)
    page = (tmp_path / "apex-cpu.md").read_text(encoding="utf-8")
    assert page.startswith("# mezzo.apex.amp against mezzo.torch\n")
    assert "| case | front | plain mezzo | ratio or difference |" in page
    assert "bfloat16" in page
