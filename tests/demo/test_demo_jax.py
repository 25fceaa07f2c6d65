"""The JAX part of the demo, on few samples: what it learns, what it reports, and what happens where it is missing."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from mezzo.demo import JaxResult, Trained, run_demo
from mezzo.demo.arrays import load_arrays
from mezzo.demo.installed import choose, missing
from mezzo.demo.jax_job import pick_jax_device
from mezzo.demo.jax_run import JaxRun
from mezzo.demo.job import JSON_NAME, PLOT_NAME
from mezzo.demo.results import PRECISIONS, Plan
from mezzo.errors import OptionError

Quick = tuple[Path, list[Trained], str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Quick:
    """One quick demo with JAX alone: where it wrote, what it returned, what it printed."""
    output, screen = tmp_path_factory.mktemp("demo"), io.StringIO()
    results = run_demo(output, quick=True, device="cpu", framework="jax", console=Console(file=screen, width=80))
    return output, results, screen.getvalue()


def jax_results(results: list[Trained]) -> list[JaxResult]:
    found = [result for result in results if isinstance(result, JaxResult)]
    assert len(found) == len(results) == 3
    return found


def test_each_precision_runs_once_with_float32_first(finished: Quick) -> None:
    _, results, _ = finished
    assert [result.precision for result in jax_results(results)] == list(PRECISIONS)


def test_losses_fall_and_accuracies_beat_guessing(finished: Quick) -> None:
    """Guessing is right once in ten."""
    _, results, _ = finished
    for result in results:
        assert len(result.train_losses) == len(result.test_losses) == len(result.epoch_seconds) == 2
        assert result.train_losses[1] < 0.7 * result.train_losses[0]
        assert 0.5 < result.test_accuracy <= 1


def test_low_precisions_learn_what_float32_learns(finished: Quick) -> None:
    """Same weights, same order: losses within 5%, accuracies within 5 of the 100 test samples.

    Float16 skips some of the 18 steps and is that much behind: 15% for its losses.
    """
    _, (plain, *mixed), _ = finished
    for result in mixed:
        tolerance = 0.15 if result.skipped_steps else 0.05
        assert result.train_losses == pytest.approx(plain.train_losses, rel=tolerance)
        assert result.test_accuracy == pytest.approx(plain.test_accuracy, abs=0.05)
        assert result.train_losses != plain.train_losses


def test_every_product_runs_in_the_precision(finished: Quick) -> None:
    """Six of each layer's attention, two of its MLP, the embedding and the classifier; float32 needs no cast."""
    _, results, _ = finished
    for result in jax_results(results):
        assert result.dots_by_dtype == {result.precision: 18}
        assert (result.casts == 0) == (result.precision == "float32")
        # At least the 18 weights, and the inputs that come in float32, some of which are shared.
        assert result.casts == 0 or result.casts > 18


def test_low_precisions_keep_less_for_the_backward_pass(finished: Quick) -> None:
    """Not half: layer norm computes in float32 and keeps what it needs of that."""
    _, results, _ = finished
    plain, *mixed = jax_results(results)
    for result in mixed:
        assert 0.5 * plain.kept_bytes < result.kept_bytes < 0.8 * plain.kept_bytes


def test_only_float16_scales_and_it_skips_some_steps(finished: Quick) -> None:
    """Nine steps an epoch, as 300 samples fill nine batches of 32."""
    _, results, _ = finished
    *others, half = results
    assert [(result.scales, result.skipped_steps) for result in others] == [((), ())] * 2
    scale, good = 2.0**16, 0
    assert len(half.scales) == 18
    for step, after in enumerate(half.scales, start=1):
        good = 0 if step in half.skipped_steps else good + 1
        scale = scale / 2 if good == 0 else scale
        if good == 5:
            scale, good = 2 * scale, 0
        assert after == scale, step
    assert 1 <= len(half.skipped_steps) <= 6


def test_compiling_is_timed_apart(finished: Quick) -> None:
    """It takes longer than the few steps do."""
    _, results, _ = finished
    for result in jax_results(results):
        assert result.compile_seconds > result.seconds > 0


def test_the_json_gives_the_results_back(finished: Quick) -> None:
    output, results, _ = finished
    document = json.loads((output / JSON_NAME).read_text(encoding="utf-8"))
    assert (document["jax"], document["jax_device"]["type"]) == (jax.__version__, "cpu")
    assert document["plan"]["epochs"] == 2
    read = []
    for entry in document["runs"]:
        assert entry.pop("framework") == "jax"
        assert entry.pop("seconds") == pytest.approx(sum(entry["epoch_seconds"]))
        assert (entry.pop("speed_up") == 1) == (entry["precision"] == "float32")
        lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
        read.append(JaxResult(**{**entry, **lists}))
    assert read == results


def test_the_screen_and_the_files_are_complete(finished: Quick) -> None:
    """At 80 columns nothing is cut short."""
    output, results, screen = finished
    assert "…" not in screen
    assert max(len(line.rstrip()) for line in screen.splitlines() if str(output) not in line) <= 80
    for text in ("JAX bfloat16", "2/2", "speed", "compile,", "kept,", "transformer", "float16 18"):
        assert text in screen
    assert "PyTorch" not in screen
    half = next(line for line in screen.splitlines() if line.startswith("float16 "))
    assert half.split()[-2:] == [str(jax_results(results)[2].casts), str(len(results[2].skipped_steps))]
    assert {path.name for path in output.iterdir()} == {PLOT_NAME, JSON_NAME}
    assert (output / PLOT_NAME).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_skipped_step_is_not_counted_by_the_optimizer_and_a_seed_repeats_a_run() -> None:
    """On 60 digits; the schedule counts with the optimizer. The second run takes the compiled step of the first."""
    train, test = load_arrays(seed=0, limit=80)
    plan = Plan(epochs=4, batch_size=20, growth_interval=2)
    first, second = (JaxRun(train, test, "float16", plan) for _ in range(2))
    for _ in range(plan.epochs):
        first.train_epoch()
        second._step, second._evaluate = first._step, first._evaluate
        second.train_epoch()
    one, other = first.result(), second.result()
    assert 1 <= len(one.skipped_steps) < 8
    assert first.steps_counted == 12 - len(one.skipped_steps)
    assert (one.train_losses, one.test_losses, one.scales) == (other.train_losses, other.test_losses, other.scales)


def test_both_frameworks_have_the_same_digits() -> None:
    from mezzo.demo.data import load_split

    digits = load_split(seed=3, limit=200)
    for arrays, tensors in zip(load_arrays(seed=3, limit=200), (digits.train, digits.test), strict=True):
        assert np.array_equal(arrays.images, tensors.images.squeeze(1).numpy())
        assert np.array_equal(arrays.labels, tensors.labels.numpy())


def test_an_unknown_framework_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match="The demo got framework='keras'; expected 'torch', 'jax', 'tensorplay' or 'all'"
    ):
        run_demo(tmp_path / "none", quick=True, framework="keras")
    assert not (tmp_path / "none").exists()


def test_a_device_that_jax_has_not_is_refused_unless_the_name_is_meant_for_pytorch(tmp_path: Path) -> None:
    for name in ("warp", "cpu:99", "cpu:x"):
        with pytest.raises(ValueError, match=f"JAX has no device '{name}' here; use 'cpu' or leave the device out"):
            run_demo(tmp_path / "none", quick=True, framework="jax", device=name)
    assert not (tmp_path / "none").exists()
    assert pick_jax_device("warp", strict=False) == jax.devices()[0]
    assert pick_jax_device("cpu:1") == jax.devices("cpu")[1]


def test_all_means_what_is_installed() -> None:
    assert choose("all")[:2] == ("torch", "jax")
    assert choose("jax") == ("jax",)
    assert missing("jax") is None


# A finder that lets nobody find some packages, as if they were not installed.
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run_without(absent: set[str], code: str) -> subprocess.CompletedProcess[str]:
    program = WITHOUT.format(absent=absent) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_importing_the_demo_needs_no_framework() -> None:
    absent = {"torch", "jax", "flax", "optax", "tensorplay"}
    done = run_without(absent, "import mezzo.demo; print(sorted(mezzo.demo.__all__))")
    assert done.stdout == "['JaxResult', 'RunResult', 'TensorPlayResult', 'Trained', 'run_demo']\n", done.stderr


CHOOSING = """
from mezzo.demo.installed import advice, choose
for choice in ("all", "jax"):
    try:
        print(*choose(choice))
    except ModuleNotFoundError as error:
        print(error)
print(advice("jax"))
"""


@pytest.mark.parametrize("package", ["jax", "flax", "optax"])
def test_without_jax_the_demo_says_in_one_line_how_to_get_it(package: str) -> None:
    done = run_without({package, "tensorplay"}, CHOOSING)
    command = "pip install 'mezzo[demo,jax]' flax optax"
    assert done.stdout.splitlines() == [
        "torch",
        f"the demo needs {package}, which is not installed; run: {command}",
        f"The JAX runs are left out: {package} is not installed. To have them: {command}",
    ], done.stderr


def test_without_pytorch_jax_runs_alone_and_without_both_pytorch_is_advised() -> None:
    assert run_without({"torch", "tensorplay"}, CHOOSING).stdout.splitlines()[:2] == ["jax", "jax"]
    first, *_ = run_without({"torch", "jax", "tensorplay"}, CHOOSING).stdout.splitlines()
    assert first == "the demo needs torch, which is not installed; run: pip install 'mezzo[demo]'"
