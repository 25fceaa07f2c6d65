"""The main job: train both nets in every precision, one also with prepared weights; show and save what came out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mezzo.demo.data import load_split
from mezzo.demo.devices import describe, pick_device, single_threaded
from mezzo.demo.emulation import SLOW, float16_cost
from mezzo.demo.models import MODELS
from mezzo.demo.picture import save_plot
from mezzo.demo.report import memory_table, results_table, save_json
from mezzo.demo.results import Plan, ways
from mezzo.demo.train import Run

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from mezzo.demo.data import Digits
    from mezzo.demo.results import RunResult

PLOT_NAME = "loss.png"
JSON_NAME = "results.json"
QUICK_SAMPLES = 400
QUICK_GROWTH = 5


def run_demo(
    output: Path,
    *,
    device: str | None = None,
    epochs: int | None = None,
    quick: bool = False,
    console: Console | None = None,
    seed: int = 0,
) -> list[RunResult]:
    """Train a conv net and a transformer on scikit-learn's digits: in float32, and in bfloat16 and float16 under autocast.

    The transformer is also trained prepared: weights in bfloat16 or float16, with float32 masters in the optimizer.
    The float16 runs use a gradient scaler. Shows a progress bar and a table, writes `loss.png`
    (losses, and the gradient scale) and `results.json`. On the CPU it works with one thread, and puts the
    thread count back; where float16 is slow there, its products run in float32 and are rounded, and the demo says
    so. Global random state stays as it is.

    Args:
        output: Folder for the files; made if missing.
        device: A PyTorch device; None takes CUDA, else another accelerator that has autocast, else the CPU.
        epochs: Epochs of each run; None takes 8, or 2 when `quick`.
        quick: Train on few samples, in a few seconds: shows that everything works, not how well.
        console: Where to print; None prints to standard output.
        seed: Decides the split, the initial weights and the order of the samples.

    Returns:
        One result per run; of the same model float32 first, then bfloat16 and float16, then those prepared.

    Raises:
        ValueError: If the device is not there or has no autocast, or `epochs` is below 1.
    """
    console = console or Console()
    where = pick_device(device)
    plan = _plan(epochs, seed, quick=quick)
    # Before the work, so that a folder that cannot be made costs no minute of training.
    output.mkdir(parents=True, exist_ok=True)
    with single_threaded():
        return _work(load_split(seed, limit=QUICK_SAMPLES if quick else None), plan, where, output, console)


def _work(digits: Digits, plan: Plan, where: torch.device, output: Path, console: Console) -> list[RunResult]:
    console.print(
        f"{len(digits.train)} digits to train on, {len(digits.test)} to test; "
        f"{plan.epochs} epochs per run, on {describe(where)}"
    )
    cost = float16_cost(where)
    if cost > SLOW:
        plan = replace(plan, emulate_float16=True)
        console.print(
            f"PyTorch's float16 products take {cost:.0f} times as long as float32's here; "
            "the float16 runs compute them in float32 and round"
        )
    results = _train_all(digits.to(where), plan, console)
    plot, numbers = output / PLOT_NAME, output / JSON_NAME
    save_plot(results, plot)
    save_json(results, plan, where, cost, numbers)
    console.print()
    console.print(results_table(results, where))
    console.print()
    console.print(memory_table(results))
    console.print()
    console.print(f"Plots:     {plot}", soft_wrap=True)
    console.print(f"Numbers:   {numbers}", soft_wrap=True)
    return results


def _plan(epochs: int | None, seed: int, *, quick: bool) -> Plan:
    if quick:
        # Of its 20 steps too, some are to overflow.
        return Plan(epochs=2 if epochs is None else epochs, batch_size=32, seed=seed, growth_interval=QUICK_GROWTH)
    return Plan(seed=seed) if epochs is None else Plan(epochs=epochs, seed=seed)


def _train_all(digits: Digits, plan: Plan, console: Console) -> list[RunResult]:
    results: list[RunResult] = []
    with _progress(console) as progress:
        bars = {
            (model, way): progress.add_task(f"{model}, {way}", total=plan.epochs, loss="", start=False)
            for model in MODELS
            for way in ways(model)
        }
        for model in MODELS:
            runs = [Run(model, digits, way, plan) for way in ways(model)]
            # Epoch by epoch in turn: what else the machine does then slows all runs alike.
            for _ in range(plan.epochs):
                for run in runs:
                    bar = bars[model, run.way]
                    progress.start_task(bar)
                    progress.update(bar, advance=1, loss=f"loss {run.train_epoch():.4f}")
            results.extend(run.result() for run in runs)
    return results


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
    )
