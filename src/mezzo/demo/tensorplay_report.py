"""The numbers of TensorPlay's runs for people: a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.table import Table

from mezzo.demo.report import NARROW
from mezzo.demo.results import speed_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mezzo.demo.results import TensorPlayResult

CAPTION = (
    "autocast: native is TensorPlay's own. s per epoch: training\n"
    "steps only. speed up: of that, against float32 of the same\n"
    "net. skips: steps that the gradient scaler left out, as a\n"
    "gradient had overflowed."
)
LOST = "\nnan: native autocast hands layer norm low activations and\nfloat32 weights, for which it gives garbage."


def tensorplay_table(results: Sequence[TensorPlayResult], where: str) -> Table:
    """One row per run; runs of one net stand together.

    Args:
        results: The runs.
        where: The name of the device.
    """
    lost = any(result.native and not math.isfinite(result.train_losses[-1]) for result in results)
    table = Table(
        title=f"mezzo demo with TensorPlay on {where}",
        caption=CAPTION + LOST if lost else CAPTION,
        caption_justify="left",
        **NARROW,
    )
    for heading in ("model", "precision", "autocast"):
        table.add_column(heading, no_wrap=True)
    for heading in ("train\nloss", "test\nacc.", "s per\nepoch", "speed\nup", "skips"):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, result in enumerate(results):
        last_of_model = index + 1 == len(results) or results[index + 1].model != result.model
        table.add_row(*_cells(result, results), end_section=last_of_model)
    return table


def _cells(result: TensorPlayResult, results: Sequence[TensorPlayResult]) -> list[str]:
    ratio = speed_up(result, results)
    return [
        result.model,
        result.precision,
        result.autocast or "-",
        f"{result.train_losses[-1]:.4f}",
        f"{result.test_accuracy:.1%}",
        f"{result.seconds / len(result.epoch_seconds):.3f}",
        "-" if ratio is None else f"{ratio:.2f}x",
        str(len(result.skipped_steps)) if result.scales else "-",
    ]
