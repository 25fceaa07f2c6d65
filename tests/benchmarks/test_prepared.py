"""The benchmarks of prepared models: that every side does the same work, and that the memory table counts right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.cases import PREPARE_SPEEDS, select

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[2]
SMALL = [case for case in select(["prepare"]) if "4x128" not in case.name and "compiled" not in case.name]


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def small_training(way: str):
    from benchmarks.storing import Training

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    return Training(way, model, torch.randn(8, 64))


def test_a_prepare_case_has_a_page_of_its_own(tmp_path):
    done = run_module("benchmarks", "--quick", "--case", "prepare-infer-1x1-autocast", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prepare-cpu.json", "prepare-cpu.md"]
    (row,) = json.loads((tmp_path / "prepare-cpu.json").read_text(encoding="utf-8"))["rows"]
    assert (row["name"], row["bound"]) == ("prepare-infer-1x1-autocast", 1 / 1.7)
    page = (tmp_path / "prepare-cpu.md").read_text(encoding="utf-8")
    assert page.startswith("# mezzo.torch.prepare against torch.autocast\n")
    assert "(1, 1): inference; against torch.autocast over float32 weights" in page


def test_promises_are_bounds_on_ratios_of_time():
    bounds = {case.subject: case.bound for case in select(["prepare"])}
    assert bounds["train-4x128-autocast"] == pytest.approx(1 / 1.04)
    assert bounds["infer-1x16-bfloat16"] == pytest.approx(1 / 0.95)
    assert [subject for subject, bound in bounds.items() if bound is None] == [
        "train-1x32-bfloat16",
        "train-4x128-bfloat16",
    ]
    assert bounds.keys() == PREPARE_SPEEDS.keys()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_all_sides_compute_the_same(case):
    """Prepared and autocast to float32's accuracy; a model cast whole within what bfloat16 rounds."""
    from benchmarks.workloads import build

    (dtype, value), (other_dtype, other) = (build(case, side).probe() for side in ("mezzo", "torch"))
    assert dtype == other_dtype
    # `benchmarks.rounds` lets 1% pass, and takes values below a millionth for equal.
    assert value == pytest.approx(other, rel=1e-2 if case.name.endswith("bfloat16") else 1e-4)
    assert value > 1e-2


def test_the_probe_of_training_sees_a_step_left_out():
    from benchmarks.prepared import _descent

    training = small_training("prepare")
    assert _descent(training, "autocast")[1] > 1e-4
    training.optimizer.step = lambda: None
    assert _descent(training, "autocast")[1] == 0.0


@pytest.mark.parametrize(
    ("way", "parameters", "gradients", "state", "masters"),
    [
        ("autocast", 4, 4, 8, 0),
        ("bfloat16", 2, 2, 4, 0),
        ("prepare", 2, 2, 8, 4),
        ("kahan", 2, 2, 8, 2),
    ],
)
def test_the_bytes_that_are_counted(way, parameters, gradients, state, masters):
    """Bytes a number of the linear layer's 4,160; the norm's 128 stay in float32 but where all are cast."""
    from benchmarks.memory import _count

    training = small_training(way)
    training.backward()
    training.optimizer.step()
    linear, norm, wide = 64 * 64 + 64, 128, 2 if way == "bfloat16" else 4
    steps = 4 * 4  # a step count for each of the four parameters, in float32
    assert _count(training) == {
        "parameters": parameters * linear + wide * norm,
        "gradients": gradients * linear + wide * norm,
        "optimizer_state": state * linear + 2 * wide * norm + steps,
        "masters": masters * linear,
    }


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak of a process is read from Linux")
def test_the_memory_command_writes_a_table(tmp_path):
    arguments = ("--way", "autocast", "--way", "prepare", "--size", "1x4", "--steps", "1", "--processes", "1")
    done = run_module("benchmarks.memory", *arguments, "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "prepare-memory-cpu.json").read_text(encoding="utf-8"))
    assert set(found) == {"autocast", "prepare"}
    for (answer,) in found.values():
        tensors = sum(answer[name] for name in ("parameters", "gradients", "optimizer_state", "masters"))
        # A model, and what carries it: nothing of it may have been paged out or counted twice.
        assert answer["peak"] > answer["bare"] + tensors - 2**24
        assert answer["peak"] < answer["bare"] + 3 * tensors
    page = (tmp_path / "prepare-memory-cpu.md").read_text(encoding="utf-8")
    assert page == done.stdout[:-1]
    assert page.count("\n| torch.autocast, float32 weights | 162 | 162 | 324 | 0 | 649 | ") == 1
    assert page.count("\n| prepare | 81 | 81 | 324 | 162 | 649 | ") == 1


def test_pytorch_s_ways_do_without_mezzo():
    """Their processes must not load it: its memory and its kernels would be theirs too."""
    code = (
        "import sys, benchmarks.memory as memory\n"
        "for way in ('autocast', 'bfloat16'): memory._measure(way, '1x1', 1)\n"
        "sys.exit('mezzo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
