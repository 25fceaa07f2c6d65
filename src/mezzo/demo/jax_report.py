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
    "time: training steps only, on all of XLA's threads. speed up: of that,\n"
    "against float32. compile: tracing and compiling the step and the\n"
    "evaluation. kept: what a forward pass keeps for the backward pass,\n"
    "weights included. dots: matrix products in one forward pass. casts:\n"
    "those that autocast put into it. skips: steps that the gradient scaler\n"
    "left out, as a gradient had overflowed."
)


def jax_table(results: Sequence[JaxResult], where: str) -> Table:
    """One row per run of one model, which the title names: there is no room for it in 80 columns.

    Args:
        results: The runs.
        where: The name of the device.
    """
    table = Table(
        title=f"mezzo demo with JAX: {results[0].model}, on {where}", caption=CAPTION, caption_justify="left", **NARROW
    )
    table.add_column("precision", no_wrap=True)
    for heading in ("train\nloss", "test\nacc.", "time,\ns", "speed\nup", "compile,\ns", "kept,\nMiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("dots by\ndtype", min_width=11)
    for heading in ("casts", "skips"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*_cells(result, results))
    return table


def _cells(result: JaxResult, results: Sequence[JaxResult]) -> list[str]:
    ratio = speed_up(result, results)
    return [
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
