"""The main job: train with each framework that is there; show and save what came out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from mezzo.demo import installed
from mezzo.demo.arrays import load_arrays
from mezzo.demo.picture import save_plot
from mezzo.demo.report import save_json
from mezzo.demo.results import Plan

if TYPE_CHECKING:
    from pathlib import Path

    from mezzo.demo.parts import Finished, Part
    from mezzo.demo.results import Framework, Trained

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
    framework: str = "all",
) -> list[Trained]:
    """Train small nets on scikit-learn's digits: in float32, and in bfloat16 and float16 under autocast.

    With PyTorch a conv net and a transformer. The transformer is also trained prepared: weights in bfloat16 or float16,
    with float32 masters in the optimizer. With JAX a smaller transformer, compiled; compiling is timed apart.
    With TensorPlay two nets of three layers, without and with layer norms, which are also trained in bfloat16 under
    TensorPlay's own autocast: with layer norms that ends in NaN.

    The float16 runs use a gradient scaler. Shows progress bars and tables, writes `loss.png`
    (losses, and the gradient scale) and `results.json`. On the CPU PyTorch and TensorPlay work with one thread. PyTorch's
    thread count is put back; TensorPlay's can be set once in a process and stays. Where PyTorch's float16 is slow, its
    products run in float32 and are rounded, and the demo says so. Global random state stays as it is.

    Args:
        output: Folder for the files; made if missing.
        device: A device: PyTorch's, or JAX's if PyTorch does not run. None takes CUDA, else another accelerator that has
            autocast, else the CPU. Beside PyTorch, JAX takes the CPU if that is named, else what it prefers itself.
            TensorPlay's runs are on the CPU.
        epochs: Epochs of each run; None takes 8, or 2 when `quick`.
        quick: Train on few samples, in a few seconds: shows that everything works, not how well.
        console: Where to print; None prints to standard output.
        seed: Decides the split, the initial weights and the order of the samples.
        framework: "torch", "jax", "tensorplay", or "all" for those that are installed.

    Returns:
        One result per run, `RunResult` for PyTorch's, `JaxResult` for JAX's and `TensorPlayResult` for TensorPlay's; of
        the same model float32 first, then bfloat16 and float16, then those prepared.

    Raises:
        OptionError: If there is no such framework.
        ModuleNotFoundError: If it is not installed.
        ValueError: If the device is not there or has no autocast, or `epochs` is below 1.
    """
    console = console or Console()
    chosen = installed.choose(framework)
    # The device is meant for the first of them.
    parts = [_part(name, device, first=name == chosen[0]) for name in chosen]
    plan = _plan(epochs, seed, quick=quick)
    # Before the work, so that a folder that cannot be made costs no minute of training.
    output.mkdir(parents=True, exist_ok=True)
    digits = load_arrays(seed, QUICK_SAMPLES if quick else None)
    finished = []
    for part in parts:
        finished.append(part.train(plan, digits, console))
        _show(finished[-1], console)
    if framework == "all":
        for name in installed.NEEDS:
            if name not in chosen:
                console.print(installed.advice(name), soft_wrap=True)
                console.print()
    return _save(finished, output, console)


def _part(framework: Framework, device: str | None, *, first: bool) -> Part:
    # Here, so that each framework is imported only where it is used.
    if framework == "torch":
        from mezzo.demo.torch_job import TorchPart  # noqa: PLC0415

        return TorchPart(device)
    if framework == "jax":
        from mezzo.demo.jax_job import JaxPart  # noqa: PLC0415

        return JaxPart(device, alone=first)
    from mezzo.demo.tensorplay_job import TensorPlayPart  # noqa: PLC0415

    return TensorPlayPart(device, strict=first)


def _plan(epochs: int | None, seed: int, *, quick: bool) -> Plan:
    if quick:
        # Of its 20 steps too, some are to overflow.
        return Plan(epochs=2 if epochs is None else epochs, batch_size=32, seed=seed, growth_interval=QUICK_GROWTH)
    return Plan(seed=seed) if epochs is None else Plan(epochs=epochs, seed=seed)


def _show(finished: Finished, console: Console) -> None:
    console.print()
    for table in finished.tables:
        console.print(table)
        console.print()


def _save(finished: list[Finished], output: Path, console: Console) -> list[Trained]:
    results = [result for part in finished for result in part.results]
    plot, numbers = output / PLOT_NAME, output / JSON_NAME
    save_plot(results, plot)
    # PyTorch's plan comes first, and says more: whether float16 was emulated.
    setting = {name: value for part in finished for name, value in part.setting.items()}
    save_json(results, finished[0].plan, setting, numbers)
    console.print(f"Plots:     {plot}", soft_wrap=True)
    console.print(f"Numbers:   {numbers}", soft_wrap=True)
    return results
