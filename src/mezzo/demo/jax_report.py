"""The numbers of JAX's runs for people: a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from mezzo.demo.report import MEBI, NARROW
from mezzo.demo.results import speed_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mezzo.demo.results import JaxResult

CAPTION = (
    "time: training steps only. compile: tracing and compiling them and the\n"
    "evaluation, before. speed up: of time, against float32. kept: what a forward\n"
    "pass keeps for the backward pass, weights included. dots: matrix products and\n"
    "convolutions; casts: those that autocast put in; both of one forward pass.\n"
    "skips: steps that the gradient scaler left out, as a gradient had overflowed."
)


def jax_table(results: Sequence[JaxResult], where: str) -> Table:
    """One row per run.

    Args:
        results: The runs.
        where: The name of the device.
    """
    table = Table(title=f"mezzo demo with JAX on {where}", caption=CAPTION, caption_justify="left", **NARROW)
    for heading in ("model", "precision"):
        table.add_column(heading, no_wrap=True)
    for heading in ("train\nloss", "test\nacc.", "time,\ns", "speed\nup", "com-\npile,s", "kept,\nMiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("dots by\ndtype", min_width=10)
    for heading in ("casts", "skips"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*_cells(result, results))
    return table


def _cells(result: JaxResult, results: Sequence[JaxResult]) -> list[str]:
    ratio = speed_up(result, results)
    return [
        result.model,
        result.precision,
        f"{result.train_losses[-1]:.4f}",
        f"{result.test_accuracy:.1%}",
        f"{result.seconds:.1f}",
        "-" if ratio is None else f"{ratio:.2f}x",
        f"{result.compile_seconds:.1f}",
        f"{result.kept_bytes / MEBI:.1f}",
        ", ".join(f"{dtype} {count}" for dtype, count in result.dots_by_dtype.items()) or "-",
        str(result.casts),
        str(len(result.skipped_steps)) if result.scales else "-",
    ]
