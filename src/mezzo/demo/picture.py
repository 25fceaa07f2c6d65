"""The demo's picture: loss curves of every precision, and below them what the gradient scaler did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator

from mezzo.demo.results import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from mezzo.demo.results import Trained

# From thick and pale below to thin and dark above: where the curves agree, all stay visible.
STYLES: Mapping[str, Mapping[str, Any]] = {
    "float32": {"color": "#f7c48b", "linewidth": 5.5},
    "bfloat16": {"color": "#3d8bc4", "linewidth": 2.6},
    "float16": {"color": "#5b1a4a", "linewidth": 1.0},
}
TEST_DASHES = (0, (2.5, 2))
SKIP_COLOR = "#c8372d"


def save_plot(results: Sequence[Trained], path: Path) -> None:
    """Write a PNG with a column per model and framework: losses in all precisions, and the scale of its scaled run below.

    Args:
        results: The runs, those of one model in a row; without a scaled run there is no lower panel.
        path: The file, overwritten if it exists.
    """
    # Prepared runs lie on the curves of their precision. Those under a framework's own autocast are in the table: where
    # they go to NaN there is no curve.
    results = [
        result for result in results if not (getattr(result, "prepared", False) or getattr(result, "native", False))
    ]
    models = list(dict.fromkeys(result.title for result in results))
    scaled = {result.title: result for result in results if result.scales}
    figure = Figure(figsize=(5.4 * len(models), 6.8 if scaled else 4.4), layout="constrained")
    FigureCanvasAgg(figure)  # binds the canvas to the figure: no pyplot, so no global state and no display
    heights = [5, 3] if scaled else [1]
    panels = figure.subplots(
        len(heights), len(models), sharex="col", sharey="row", squeeze=False, height_ratios=heights
    )
    for column, model in enumerate(models):
        _draw_losses(panels[0, column], [result for result in results if result.title == model])
        if model in scaled:
            _draw_scale(panels[1, column], scaled[model])
        panels[-1, column].set_xlabel("epoch")
        panels[-1, column].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0, 0].set_ylabel("mean cross-entropy loss (log scale)")
    # Outside the panels: no corner of them is free in every run.
    handles = _legend(results)
    # One panel alone is too narrow for them in a row.
    columns = len(handles) if len(models) > 1 else 3
    figure.legend(handles=handles, frameon=False, ncols=columns, loc="outside lower center")
    if scaled:
        panels[1, 0].set_ylabel("gradient scale, float16\n(log2 scale)")
    break_ = " " if len(models) > 1 else "\n"
    figure.suptitle(f"Handwritten digits: float32,{break_}and bfloat16 and float16 under mezzo's autocast")
    figure.savefig(path, format="png", dpi=150)


def _draw_losses(panel: Axes, results: Sequence[Trained]) -> None:
    for result in results:
        epochs = range(1, len(result.train_losses) + 1)
        style = STYLES[result.precision]
        panel.plot(epochs, result.train_losses, **style)
        panel.plot(epochs, result.test_losses, **style, linestyle=TEST_DASHES)
    accuracies = ", ".join(f"{result.precision} {result.test_accuracy:.1%}" for result in results)
    panel.set_title(f"{results[0].title}\ntest accuracy: {accuracies}", fontsize="medium")
    panel.set_yscale("log")
    _tidy(panel)


def _legend(results: Sequence[Trained]) -> list[Line2D]:
    # Color says which precision, dashes which data: five entries instead of six, and none twice.
    present = {result.precision for result in results}
    colors = [Line2D([], [], label=name, **STYLES[name]) for name in PRECISIONS if name in present]
    training = Line2D([], [], color="#555555", label="training")
    test = Line2D([], [], color="#555555", linestyle=TEST_DASHES, label="test")
    return [*colors, training, test]


def _draw_scale(panel: Axes, result: Trained) -> None:
    # In epochs, so that the scale stands below the losses of its time.
    per_epoch = len(result.scales) / len(result.train_losses)
    steps = [step / per_epoch for step in range(1, len(result.scales) + 1)]
    panel.plot(steps, result.scales, drawstyle="steps-post", color=STYLES["float16"]["color"], linewidth=1.5)
    # At the scale that made the gradients overflow: the one before the step, where there was a step before.
    skips = [(step / per_epoch, result.scales[max(step - 2, 0)]) for step in result.skipped_steps]
    panel.scatter(
        [at for at, _ in skips], [scale for _, scale in skips], marker="x", color=SKIP_COLOR, zorder=3, linewidths=1.5
    )
    panel.set_title(
        f"{len(result.skipped_steps)} of {len(result.scales)} steps skipped (x): the gradients had overflowed",
        fontsize="medium",
    )
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_locator(LogLocator(base=2, numticks=12))
    _tidy(panel)


def _tidy(panel: Axes) -> None:
    panel.grid(visible=True, which="major", alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
