"""The demo's results for people and for programs: a table, a picture, a JSON file."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table

from mezzo.demo.devices import describe
from mezzo.demo.results import speed_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from mezzo.demo.results import Plan, RunResult

MEBI = 2**20
# Float32 thick and pale below, bfloat16 thin and dark above: where the curves agree, both stay visible.
STYLES: Mapping[str, Mapping[str, Any]] = {
    "float32": {"color": "#f2a65a", "linewidth": 4.0},
    "bfloat16": {"color": "#1d3f72", "linewidth": 1.3},
}
CAPTION = (
    "time: training steps only. speed up: against float32 of the same model.\n"
    "peak: memory of one training step. listed ops, casts: calls that autocast\n"
    "decided on and casts it inserted, in one forward pass with its loss."
)


def results_table(results: Sequence[RunResult], device: torch.device) -> Table:
    """One row per run; runs of one model stand together."""
    table = Table(
        title=f"mezzo demo on {describe(device)}",
        caption=CAPTION,
        caption_justify="left",
        # Narrow enough for 80 columns, what a log file or a pipe gets.
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for heading in ("model", "precision"):
        table.add_column(heading, no_wrap=True)
    for heading in ("train\nloss", "test\nacc.", "time,\ns", "speed\nup", "peak,\nMiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("listed ops\nby dtype", min_width=12)
    table.add_column("casts", justify="right", no_wrap=True)
    for index, result in enumerate(results):
        last_of_model = index + 1 == len(results) or results[index + 1].model != result.model
        table.add_row(*_cells(result, results), end_section=last_of_model)
    return table


def _cells(result: RunResult, results: Sequence[RunResult]) -> list[str]:
    ratio = speed_up(result, results)
    return [
        result.model,
        result.precision,
        f"{result.train_losses[-1]:.4f}",
        f"{result.test_accuracy:.1%}",
        f"{result.seconds:.1f}",
        "-" if ratio is None else f"{ratio:.2f}x",
        f"{result.peak_memory_bytes / MEBI:.1f}",
        ", ".join(f"{dtype} {count}" for dtype, count in result.ops_by_dtype.items()) or "-",
        str(result.casts),
    ]


def save_plot(results: Sequence[RunResult], path: Path) -> None:
    """Write the loss curves as PNG: a panel per model, both precisions in it."""
    models = list(dict.fromkeys(result.model for result in results))
    figure = Figure(figsize=(5.4 * len(models), 4.4), layout="constrained")
    FigureCanvasAgg(figure)  # binds the canvas to the figure: no pyplot, so no global state and no display
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for panel, model in zip(panels, models, strict=True):
        _draw(panel, [result for result in results if result.model == model])
    panels[0].set_ylabel("mean cross-entropy loss (log scale)")
    panels[0].legend(frameon=False)
    figure.suptitle("Handwritten digits: float32 against bfloat16 under mezzo's autocast")
    figure.savefig(path, format="png", dpi=150)


def _draw(panel: Axes, results: Sequence[RunResult]) -> None:
    for result in results:
        epochs = range(1, len(result.train_losses) + 1)
        style = STYLES[result.precision]
        panel.plot(epochs, result.train_losses, **style, label=f"training, {result.precision}")
        panel.plot(epochs, result.test_losses, **style, linestyle=(0, (2.5, 2)), label=f"test, {result.precision}")
    accuracies = ", ".join(f"{result.precision} {result.test_accuracy:.1%}" for result in results)
    panel.set_title(f"{results[0].model}\ntest accuracy: {accuracies}", fontsize="medium")
    panel.set_yscale("log")
    panel.set_xlabel("epoch")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(visible=True, which="major", alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def save_json(results: Sequence[RunResult], plan: Plan, device: torch.device, path: Path) -> None:
    """Write every number, and what is needed to judge or repeat it."""
    document = {
        "mezzo": importlib.metadata.version("mezzo"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": {"type": device.type, "name": describe(device)},
        "threads": torch.get_num_threads(),
        # On CUDA, "float32" convolutions may use TF32; this is the setting for matrix products.
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "plan": asdict(plan),
        "runs": [
            {**asdict(result), "seconds": result.seconds, "speed_up": speed_up(result, results)} for result in results
        ],
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
