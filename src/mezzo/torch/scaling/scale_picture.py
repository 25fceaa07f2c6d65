"""The picture of a scale's history: the scale, the skipped steps, and below them the norms of the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .scale_history import ScaleRow

__all__ = ["save_picture", "scale_figure"]

_LINE, _SKIP = "#5b1a4a", "#c8372d"


def save_picture(rows: Sequence[ScaleRow], path: str | PathLike[str]) -> None:
    """Draw rows into a file; see `mezzo.torch.ScaleHistory.plot`.

    Args:
        rows: The rows, in order of their steps.
        path: The file; its suffix says which format.
    """
    scale_figure(rows).savefig(path, dpi=150)


def scale_figure(rows: Sequence[ScaleRow]) -> Figure:
    """Draw rows into a figure of Matplotlib that is in no global state.

    Args:
        rows: The rows, in order of their steps; there may be none.

    Returns:
        A figure with one panel, or two if there is any finite norm.

    Raises:
        ModuleNotFoundError: Matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
        from matplotlib.figure import Figure  # noqa: PLC0415
        from matplotlib.ticker import MaxNLocator  # noqa: PLC0415
    except ModuleNotFoundError as error:
        msg = f"the picture of a scale needs {error.name}, which is not installed; run: pip install 'mezzo[demo]'"
        raise ModuleNotFoundError(msg, name=error.name) from error
    norms = [(row.step, row.norm) for row in rows if row.norm is not None and math.isfinite(row.norm)]
    figure = Figure(figsize=(8, 5.4 if norms else 3.4), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot, so no display
    heights = [3, 2] if norms else [1]
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _draw_scale(panels[0], rows)
    if norms:
        _draw_norms(panels[1], norms)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#dddddd", linewidth=0.7)
    return figure


def _draw_scale(panel: Axes, rows: Sequence[ScaleRow]) -> None:
    skipped = [row for row in rows if row.skipped]
    panel.set_title(f"{len(skipped)} of {len(rows)} steps skipped (x)" if rows else "no steps yet", fontsize="medium")
    panel.set_ylabel("scale (log2)")
    panel.set_yscale("log", base=2)
    panel.plot([row.step for row in rows], [row.scale for row in rows], drawstyle="steps-post", color=_LINE)
    # At the scale at which gradients overflowed.
    at, scales = [row.step for row in skipped], [row.scale for row in skipped]
    panel.scatter(at, scales, marker="x", color=_SKIP, zorder=3)


def _draw_norms(panel: Axes, norms: Sequence[tuple[int, float]]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter  # noqa: PLC0415 - an extra

    panel.set_ylabel("gradient norm")
    least, most = min(norm for _, norm in norms), max(norm for _, norm in norms)
    # Less than two decades may hold one power of ten alone, and the ticks between them have long labels.
    if least > 0 and most / least >= 100:
        panel.set_yscale("log")
        panel.yaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.plot([step for step, _ in norms], [norm for _, norm in norms], color=_LINE, marker=".", markersize=3)
