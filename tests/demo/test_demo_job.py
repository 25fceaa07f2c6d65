"""The main job from end to end, with PyTorch, on few samples."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from mezzo.demo import RunResult, run_demo
from mezzo.demo.emulation import SLOW
from mezzo.demo.job import JSON_NAME, PLOT_NAME
from mezzo.demo.models import MODELS
from mezzo.demo.results import Way, ways


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One quick demo for all tests: where it wrote, what it returned, what it printed, state kept or not."""
    output = tmp_path_factory.mktemp("demo") / "made" / "by the demo"
    screen = io.StringIO()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(3)
    console = Console(file=screen, width=80)
    results = run_demo(output, device="cpu", quick=True, framework="torch", console=console)
    untouched = torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == 3
    torch.set_num_threads(threads)
    return output, results, screen.getvalue(), untouched


def test_every_model_runs_in_every_precision(finished):
    _, results, _, _ = finished
    assert [(run.model, run.way) for run in results] == [(model, way) for model in MODELS for way in ways(model)]
    assert {(run.model, run.precision) for run in results if run.prepared} == {
        ("transformer", "bfloat16"),
        ("transformer", "float16"),
    }


def test_losses_fall_and_accuracies_beat_guessing(finished):
    """Guessing is right once in ten."""
    _, results, _, _ = finished
    for run in results:
        assert len(run.train_losses) == len(run.test_losses) == len(run.epoch_seconds) == 2
        assert run.train_losses[1] < 0.7 * run.train_losses[0]
        assert 0.5 < run.test_accuracy <= 1


def by_model(results):
    """The runs of each model, in their order: float32 first."""
    return [[run for run in results if run.model == model] for model in MODELS]


def test_low_precisions_learn_what_float32_learns(finished):
    """Same weights, same order: losses within 5%, accuracies within 5 of the 100 test samples.

    Float16 skips some of the 20 steps and is that much behind: 10% for its losses.
    """
    _, results, _, _ = finished
    for plain, *mixed in by_model(results):
        for run in mixed:
            tolerance = 0.1 if run.skipped_steps else 0.05
            assert run.train_losses == pytest.approx(plain.train_losses, rel=tolerance)
            assert run.test_accuracy == pytest.approx(plain.test_accuracy, abs=0.05)
            assert run.train_losses != plain.train_losses


def test_prepared_runs_learn_what_autocast_learns(finished):
    """With masters, the losses of autocast over float32 weights; the scaler moves the same way."""
    _, results, _, _ = finished
    for run in results:
        if run.prepared:
            other = next(one for one in results if one.model == run.model and one.way == Way(run.precision))
            # The last digits, as PyTorch's AdamW may sum in another order than a pass over masters does.
            assert run.train_losses == pytest.approx(other.train_losses, rel=1e-3)
            assert run.test_losses == pytest.approx(other.test_losses, rel=1e-3)
            assert (run.scales, run.skipped_steps) == (other.scales, other.skipped_steps)
            assert run.casts < other.casts / 2
            assert run.ops_by_dtype == other.ops_by_dtype


def test_prepared_weights_take_half_and_masters_are_counted(finished):
    """Nearly: norms and the positions stay in float32. Float16's gradients are float32, bfloat16's are not."""
    _, results, _, _ = finished
    for run in results:
        held, all_of_it = run.held_bytes, 4 * run.parameters
        assert held["state"] == pytest.approx(2 * all_of_it, rel=1e-4)  # AdamW's step counts come on top
        if not run.prepared:
            assert (held["weights"], held["gradients"], held["masters"]) == (all_of_it, all_of_it, 0)
            continue
        low = held["masters"] // 4
        assert 0.98 * run.parameters < low < run.parameters
        assert held["weights"] == all_of_it - 2 * low
        assert held["gradients"] == (all_of_it if run.precision == "float16" else held["weights"])


def test_low_precisions_need_less_memory(finished):
    _, results, _, _ = finished
    for plain, *mixed in by_model(results):
        for run in mixed:
            # Weights, gradients and AdamW's two moments, four bytes each, are the least a step holds: with masters too.
            assert 16 * run.parameters < run.peak_memory_bytes
            # With batches as small as these, the peak is in AdamW's step: it may see float32 copies of the gradients.
            copies = 4 * run.parameters if run.prepared else 0
            assert run.peak_memory_bytes < plain.peak_memory_bytes + copies


def test_the_scale_moves_even_in_the_quick_demo(finished):
    """Up and down: every float16 run grows its scale and skips a step, and no other run has a scale."""
    _, results, _, _ = finished
    for run in results:
        if run.precision != "float16":
            assert run.scales == ()
            continue
        assert len(run.scales) == 20
        assert max(run.scales) > 2**16
        assert 1 <= len(run.skipped_steps) <= 5
        for step in run.skipped_steps:
            assert run.scales[step - 1] == run.scales[step - 2] / 2


def test_the_plot_is_a_png_of_some_size(finished):
    output, _, _, _ = finished
    picture = (output / PLOT_NAME).read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert width > 1000
    assert height > 800
    assert len(picture) > 20_000


def test_the_json_gives_the_results_back(finished):
    output, results, _, _ = finished
    document = json.loads((output / JSON_NAME).read_text(encoding="utf-8"))
    read = []
    for entry in document["runs"]:
        assert entry.pop("framework") == "torch"
        assert entry.pop("seconds") == pytest.approx(sum(entry["epoch_seconds"]))
        assert (entry.pop("speed_up") == 1) == (entry["precision"] == "float32")
        lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
        read.append(RunResult(**{**entry, **lists}))
    assert read == results


def test_the_json_says_how_to_repeat_it(finished):
    output, _, _, _ = finished
    document = json.loads((output / JSON_NAME).read_text(encoding="utf-8"))
    assert document["torch"] == torch.__version__
    assert document["device"]["type"] == "cpu"
    assert document["threads"] == 1
    assert document["plan"]["seed"] == 0
    assert document["plan"]["epochs"] == 2
    assert document["mezzo"]
    assert document["float16_cost"] > 0
    assert document["plan"]["emulate_float16"] == (document["float16_cost"] > SLOW)


def test_the_screen_shows_table_progress_and_paths(finished):
    """Complete at 80 columns: nothing cut short, every model and precision, both files."""
    output, _, screen, _ = finished
    assert "…" not in screen
    names = ("conv net, bfloat16", "transformer, float16", "bfloat16 ", "float16*")
    for text in (*names, "2/2", "speed", "peak,", "casts", "skips", "masters"):
        assert text in screen
    assert str(output / PLOT_NAME) in screen
    assert str(output / JSON_NAME) in screen


def test_the_screen_owns_up_to_emulation(finished):
    """Before the work with the measured cost, and below the table; only where float16 is slow."""
    _, results, screen, _ = finished
    emulated = results[-1].emulated
    assert ("PyTorch's float16 products take" in screen) == emulated
    assert ("its time is not float16's" in screen) == emulated


def test_nothing_global_changes(finished):
    """Random state and thread count are the caller's."""
    _, _, _, untouched = finished
    assert untouched


def test_too_few_epochs_are_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match="epochs=0"):
        run_demo(tmp_path / "none", epochs=0, quick=True, console=Console(file=io.StringIO()))
    assert not (tmp_path / "none").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_demo_takes_the_gpu(tmp_path):
    """Chosen without being asked for; memory is CUDA's count, and the numbers are as good as on the CPU."""
    results = run_demo(tmp_path, quick=True, framework="torch", console=Console(file=io.StringIO()))
    document = json.loads((tmp_path / JSON_NAME).read_text(encoding="utf-8"))
    assert document["device"] == {"type": "cuda", "name": torch.cuda.get_device_name()}
    for plain, *mixed in by_model(results):
        for run in mixed:
            assert run.train_losses == pytest.approx(plain.train_losses, rel=0.1 if run.skipped_steps else 0.05)
            assert 16 * run.parameters < run.peak_memory_bytes
            assert run.ops_by_dtype[run.precision] >= 4
            assert not run.emulated
