"""The demo's numbers for people and for programs: PyTorch's tables, and a JSON file for all."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from mezzo.demo.results import speed_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mezzo.demo.results import Plan, RunResult, Trained

MEBI = 2**20
CAPTION = (
    "time: training steps only. speed up: against float32 of the same model.\n"
    "peak: memory of one training step. listed ops, casts: calls that autocast\n"
    "decided on and casts it inserted, in one forward pass with its loss.\n"
    "skips: steps that the gradient scaler left out, as a gradient had overflowed."
)
PREPARED = "\n*: prepared, so that weights are stored in this dtype, with float32 masters."
EMULATED = (
    "\nfloat16: its products ran in float32 and were rounded, as PyTorch's own\n"
    "float16 products are slow on this CPU. So its time is not float16's."
)

# Narrow enough for 80 columns, what a log file or a pipe gets.
NARROW: Mapping[str, Any] = {"box": box.SIMPLE_HEAD, "padding": 0, "pad_edge": False, "show_edge": False}


def results_table(results: Sequence[RunResult], where: str) -> Table:
    """One row per run; runs of one model stand together.

    Args:
        results: The runs, of PyTorch.
        where: The name of the device.
    """
    table = Table(
        title=f"mezzo demo on {where}",
        caption=_caption(results),
        caption_justify="left",
        **NARROW,
    )
    for heading in ("model", "precision"):
        table.add_column(heading, no_wrap=True)
    for heading in ("train\nloss", "test\nacc.", "time,\ns", "speed\nup", "peak,\nMiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("listed ops\nby dtype", min_width=12)
    for heading in ("casts", "skips"):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, result in enumerate(results):
        last_of_model = index + 1 == len(results) or results[index + 1].model != result.model
        table.add_row(*_cells(result, results), end_section=last_of_model)
    return table


def _caption(results: Sequence[RunResult]) -> str:
    prepared = PREPARED if any(result.prepared for result in results) else ""
    return CAPTION + prepared + (EMULATED if any(result.emulated for result in results) else "")


def memory_table(results: Sequence[RunResult]) -> Table:
    """What lives from step to step, a row per run of the models that were trained with prepared weights too."""
    table = Table(title="held between training steps, MiB", **NARROW)
    for heading in ("model", "precision"):
        table.add_column(heading, no_wrap=True)
    for heading in ("weights", "gradients", "state", "masters"):
        table.add_column(heading, justify="right", no_wrap=True)
    models = {result.model for result in results if result.prepared}
    for result in results:
        if result.model in models:
            numbers = [f"{result.held_bytes[name] / MEBI:.2f}" for name in ("weights", "gradients", "state", "masters")]
            table.add_row(result.model, str(result.way), *numbers)
    return table


def _cells(result: RunResult, results: Sequence[RunResult]) -> list[str]:
    ratio = speed_up(result, results)
    return [
        result.model,
        str(result.way),
        f"{result.train_losses[-1]:.4f}",
        f"{result.test_accuracy:.1%}",
        f"{result.seconds:.1f}",
        "-" if ratio is None else f"{ratio:.2f}x",
        f"{result.peak_memory_bytes / MEBI:.1f}",
        ", ".join(f"{dtype} {count}" for dtype, count in result.ops_by_dtype.items()) or "-",
        str(result.casts),
        str(len(result.skipped_steps)) if result.scales else "-",
    ]


def save_json(results: Sequence[Trained], plan: Plan, setting: Mapping[str, Any], path: Path) -> None:
    """Write every number, and what is needed to judge or repeat it. JSON has no NaN; null stands for it.

    Args:
        results: The runs, of all frameworks.
        plan: What they were asked to do.
        setting: Versions, devices and their like.
        path: The file, overwritten if it exists.
    """
    document = {
        "mezzo": importlib.metadata.version("mezzo"),
        "python": platform.python_version(),
        **setting,
        "plan": asdict(plan),
        "runs": [
            {
                "framework": result.framework,
                **asdict(result),
                "seconds": result.seconds,
                "speed_up": speed_up(result, results),
            }
            for result in results
        ],
    }
    path.write_text(json.dumps(_without_nan(document), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
