"""The TensorPlay part of the demo, on few samples: what it learns, what it reports, and what happens where it is missing.

It runs in a process of its own, as a crash of TensorPlay's ends the process.
"""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mezzo.demo.job import JSON_NAME, PLOT_NAME
from mezzo.demo.picture import save_plot
from mezzo.demo.report import save_json
from mezzo.demo.results import Plan, Precision, RunResult, TensorPlayResult, speed_up
from mezzo.demo.tensorplay_report import tensorplay_table

from .test_demo_jax import WITHOUT

Quick = tuple[Path, list[dict[str, Any]], str]
needs_tensorplay = pytest.mark.skipif(
    find_spec("tensorplay") is None, reason="needs tensorplay, which is not installed"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Quick:
    """One quick demo with TensorPlay alone: where it wrote, its runs as the JSON file has them, what it printed."""
    output = tmp_path_factory.mktemp("demo")
    done = run("-m", "mezzo", "demo", "--quick", "--framework", "tensorplay", "--output", str(output))
    assert (done.returncode, done.stderr) == (0, "")
    return output, json.loads((output / JSON_NAME).read_text(encoding="utf-8"))["runs"], done.stdout


@needs_tensorplay
def test_both_nets_run_in_every_precision_and_under_both_autocasts(finished: Quick) -> None:
    _, runs, _ = finished
    ways = [("float32", False), ("bfloat16", True), ("bfloat16", False), ("float16", False)]
    expected = [(model, *way) for model in ("plain net", "norm net") for way in ways]
    assert [(each["model"], each["precision"], each["native"]) for each in runs] == expected
    assert {each["framework"] for each in runs} == {"tensorplay"}


@needs_tensorplay
def test_under_mezzo_low_precisions_learn_what_float32_learns(finished: Quick) -> None:
    """Same weights, same order: losses within 5%, accuracies within 5 of the 100 test samples.

    Float16 skips some of the 20 steps and is that much behind: 15% for its losses.
    """
    _, runs, _ = finished
    for plain, _, *mixed in (runs[:4], runs[4:]):
        for each in mixed:
            tolerance = 0.15 if each["skipped_steps"] else 0.05
            assert each["train_losses"] == pytest.approx(plain["train_losses"], rel=tolerance)
            assert each["train_losses"][1] < 0.7 * each["train_losses"][0]
            assert each["test_accuracy"] == pytest.approx(plain["test_accuracy"], abs=0.05)
            assert each["train_losses"] != plain["train_losses"]


@needs_tensorplay
def test_native_autocast_learns_without_layer_norms_and_is_lost_with_them(finished: Quick) -> None:
    """NaN is null in the file, and guessing is right once in ten."""
    _, runs, _ = finished
    plain, lost = (each for each in runs if each["native"])
    assert plain["train_losses"] == pytest.approx(runs[0]["train_losses"], rel=0.05)
    assert lost["train_losses"] == lost["test_losses"] == [None, None]
    assert lost["test_accuracy"] < 0.2


@needs_tensorplay
def test_only_float16_scales_and_its_scale_moves(finished: Quick) -> None:
    _, runs, _ = finished
    for each in runs:
        assert bool(each["scales"]) == (each["precision"] == "float16")
        if each["scales"]:
            before = [2.0**16, *each["scales"]]
            fallen = [step for step, scale in enumerate(each["scales"], 1) if scale < before[step - 1]]
            assert fallen == each["skipped_steps"]
            assert len(each["scales"]) == 20
            assert max(each["scales"]) > 2**16


@needs_tensorplay
def test_the_screen_and_the_files_are_complete(finished: Quick) -> None:
    """At 80 columns nothing is cut short, and what is lost is said to be."""
    output, _, screen = finished
    assert "…" not in screen
    assert max(len(line.rstrip()) for line in screen.splitlines() if str(output) not in line) <= 80
    for text in (
        "norm net, bfloat16, native",
        "2/2",
        "speed",
        "s per",
        "native autocast hands layer norm low activations",
    ):
        assert text in screen
    assert "PyTorch" not in screen
    assert "JAX" not in screen
    lost = next(line for line in screen.splitlines() if line.startswith("norm net  bfloat16  native"))
    assert lost.split()[4] == "nan"
    assert {path.name for path in output.iterdir()} == {PLOT_NAME, JSON_NAME}
    assert (output / PLOT_NAME).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


PROGRAM = """
import tensorplay
from mezzo.demo.arrays import load_arrays
from mezzo.demo.results import Plan
from mezzo.demo.tensorplay_job import TensorPlayPart
from mezzo.demo.tensorplay_run import TensorPlayRun, TensorPlayWay

tensorplay.set_num_threads(1)
state = tensorplay.get_rng_state()
results = []
for seed in (0, 0, 1):
    plan = Plan(epochs=1, batch_size=20, seed=seed)
    run = TensorPlayRun("norm net", *load_arrays(0, 80), TensorPlayWay("bfloat16"), plan)
    run.train_epoch()
    results.append((run.result().train_losses, run.result().test_losses))
print(results[0] == results[1], results[0] == results[2], tensorplay.equal(state, tensorplay.get_rng_state()))

for device in (None, "cpu"):
    TensorPlayPart(device, strict=True)
TensorPlayPart("cuda", strict=False)
try:
    TensorPlayPart("cuda", strict=True)
except ValueError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What the program prints: one process for two tests, as starting one takes longer than they do."""
    done = run("-c", PROGRAM)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@needs_tensorplay
def test_a_seed_repeats_a_run_and_the_global_random_state_stays(printed: list[str]) -> None:
    assert printed[0] == "True False True"


@needs_tensorplay
def test_a_device_is_refused_unless_the_name_is_meant_for_another_framework(printed: list[str]) -> None:
    message = "The demo trains with TensorPlay on the CPU, got 'cuda'; use 'cpu' or leave the device out."
    assert printed[1:] == [message]


CHOOSING = """
from mezzo.demo.installed import advice, choose
print(*choose("all"))
try:
    choose("tensorplay")
except ModuleNotFoundError as error:
    print(error)
print(advice("tensorplay"))
"""


def test_without_tensorplay_the_demo_says_in_one_line_how_to_get_it() -> None:
    done = run("-c", WITHOUT.format(absent={"tensorplay"}) + CHOOSING)
    command = "pip install 'mezzo[demo,tensorplay]'"
    assert done.stdout.splitlines() == [
        "torch jax",
        f"the demo needs tensorplay, which is not installed; run: {command}",
        f"The TensorPlay runs are left out: tensorplay is not installed. To have them: {command}",
    ], done.stderr


def result(precision: Precision = "float32", *, native: bool = False, loss: float = 0.5) -> TensorPlayResult:
    return TensorPlayResult(
        model="norm net",
        precision=precision,
        native=native,
        parameters=10,
        train_losses=(2.0, loss),
        test_losses=(2.1, loss),
        test_accuracy=0.987,
        epoch_seconds=(1.0, 2.0),
    )


def shown(results: list[TensorPlayResult]) -> str:
    screen = io.StringIO()
    Console(file=screen, width=80).print(tensorplay_table(results, "a CPU"))
    return screen.getvalue()


def test_a_row_holds_the_numbers_and_whose_autocast_it_was() -> None:
    rows = [line.split() for line in shown([result(), result("bfloat16", native=True)]).splitlines()]
    found = [row for row in rows if row[:2] == ["norm", "net"]]
    assert found == [
        ["norm", "net", "float32", "-", "0.5000", "98.7%", "1.500", "1.00x", "-"],
        ["norm", "net", "bfloat16", "native", "0.5000", "98.7%", "1.500", "1.00x", "-"],
    ]


def test_the_caption_blames_native_autocast_only_for_its_own_losses() -> None:
    blame = "native autocast hands layer norm low activations"
    assert blame in shown([result(), result("bfloat16", native=True, loss=math.nan)])
    assert blame not in shown([result(), result("bfloat16", native=True)])
    assert blame not in shown([result(), result("bfloat16", loss=math.nan)])


def test_the_json_is_valid_where_a_loss_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / JSON_NAME
    save_json([result(loss=math.nan)], Plan(), {}, path)

    def refuse(name: str) -> None:
        pytest.fail(f"{name} is no JSON")

    (run,) = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)["runs"]
    assert run["train_losses"] == [2.0, None]


def test_the_plot_leaves_native_runs_out(tmp_path: Path) -> None:
    """So that it is the same picture with them and without."""
    mezzos = [result(), result("bfloat16", loss=0.6)]
    pictures = []
    for number, results in enumerate((mezzos, [*mezzos, result("bfloat16", native=True, loss=math.nan)])):
        path = tmp_path / f"{number}.png"
        save_plot(results, path)
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]


def test_the_speed_up_is_against_the_same_framework() -> None:
    """A model of PyTorch's may have the same name."""
    same_name = RunResult(
        model="norm net",
        precision="float32",
        parameters=1,
        train_losses=(1.0,),
        test_losses=(1.0,),
        test_accuracy=0.5,
        epoch_seconds=(90.0,),
        peak_memory_bytes=1,
        ops_by_dtype={},
        casts=0,
    )
    assert speed_up(result("bfloat16"), [same_name, result()]) == 1.0
