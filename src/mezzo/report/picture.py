"""The picture of exponents: how large the numbers of a report are, against what float16 and bfloat16 can hold.

Needs matplotlib, which comes with the extra ``demo``, when a picture is drawn and not before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo.errors import OptionError

from .numbers import Numbers

if TYPE_CHECKING:
    from os import PathLike

    from .records import OpRecord
    from .report import Report

__all__ = ["FORMATS", "FormatRange", "exponents_picture", "numbers_by"]


@dataclass(frozen=True)
class FormatRange:
    """The exponents of 2 that a floating-point format has.

    Attributes:
        name: The dtype.
        subnormal: The smallest of its subnormal numbers.
        normal: The smallest of its other numbers.
        largest: The largest.

    Example:
        >>> [one.name for one in FORMATS if one.normal <= -20 <= one.largest]
        ['bfloat16']
    """

    name: str
    subnormal: int
    normal: int
    largest: int


FORMATS = (FormatRange("float16", -24, -14, 15), FormatRange("bfloat16", -133, -126, 127))
"""What the picture compares with."""

_KINDS = {"activations": ("forward", "recomputation"), "gradients": ("backward",)}
_COLORS = {"activations": "#3d8bc4", "gradients": "#5b1a4a", "float16": "#f7c48b", "bfloat16": "#bcd9c4"}
_SUFFIXES = (".png", ".svg", ".pdf")


def numbers_by(report: Report, *, per_module: bool = False, module: str | None = None) -> dict[str, dict[str, Numbers]]:
    """Add up the numbers of a report's ops.

    Args:
        report: A report whose ops were measured, as ``numerics=True`` does it.
        per_module: Whether each module is on its own; else there is one entry, ``""``.
        module: Keep only the ops of this module and of those inside of it; None keeps all.

    Returns:
        Module to ``"activations"`` and ``"gradients"``, in the order in which the modules ran first; without those that have
        no measured ops.

    Example:
        >>> from mezzo.report import OpRecord, Region, Report
        >>> two = Numbers(2, 4.0, 1.0, exponents={0: 1, 2: 1})
        >>> ops = [OpRecord("mm", "fp32", path=("net.fc",), phase=phase, numbers=two) for phase in ("forward", "backward")]
        >>> found = numbers_by(Report("net", "torch", (Region("net", records=tuple(ops)),)), per_module=True)
        >>> [(name, list(kinds)) for name, kinds in found.items()]
        [('net.fc', ['activations', 'gradients'])]
    """
    many: dict[str, dict[str, list[Numbers]]] = {}
    for record in report.records:
        name = "/".join(record.path)
        kind = _kind(record)
        if record.numbers is None or kind is None or not _is_inside(name, module):
            continue
        many.setdefault(name if per_module else "", {}).setdefault(kind, []).append(record.numbers)
    return {
        name: {kind: Numbers.merge(kinds[kind]) for kind in _KINDS if kind in kinds} for name, kinds in many.items()
    }


def _kind(record: OpRecord) -> str | None:
    return next((kind for kind, phases in _KINDS.items() if record.phase in phases), None)


def _is_inside(name: str, module: str | None) -> bool:
    return module is None or name == module or name.startswith((f"{module}.", f"{module}/"))


def exponents_picture(
    report: Report, path: str | PathLike[str], *, per_module: bool = False, module: str | None = None
) -> Path:
    """Draw how large the numbers of activations and of gradients are, against the ranges of float16 and bfloat16.

    Args:
        report: A report whose ops were measured, as ``numerics=True`` does it.
        path: The file, overwritten if it exists; its suffix says the format: ``.png``, ``.svg`` or ``.pdf``.
        per_module: False draws a histogram of all; True a row for each module, dark where most of its numbers are.
        module: Draw only this module and those inside of it; None draws all.

    Returns:
        The path.

    Raises:
        OptionError: The report has no numbers of that module, or the suffix is another.
        ImportError: matplotlib is not installed.

    May be called in any thread; no display is needed.
    """
    target = Path(path)
    if target.suffix.lower() not in _SUFFIXES:
        msg = (
            f"A picture is written as {', '.join(_SUFFIXES)}, got {target.name!r}; give the file one of these suffixes."
        )
        raise OptionError(msg)
    found = numbers_by(report, per_module=per_module, module=module)
    if not found:
        where = f" of the module {module!r}" if module is not None else ""
        msg = f"The report {report.title!r} has no numbers{where} to draw; make it with numerics=True, or name another one."
        raise OptionError(msg)
    figure = _figure(8.6, max(2, len(found)) * 0.22 + 1.9 if per_module else 5.6)
    if per_module:
        _draw_modules(figure, found)
    else:
        _draw_all(figure, found[""])
    figure.suptitle(f"Exponents: {report.title}" + (f", {module}" if module else ""))
    figure.savefig(target, dpi=150)
    return target


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - the core needs no library
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        msg = 'Pictures need matplotlib, which is not installed: pip install "mezzo[demo]".'
        raise ImportError(msg) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # binds the canvas to the figure: no pyplot, so no global state and no display
    return figure


def _limits(many: Sequence[Numbers]) -> tuple[int, int]:
    """Give the exponents to show: all that occur, and the whole of float16."""
    exponents = [exponent for numbers in many for exponent in numbers.exponents]
    return min([*exponents, FORMATS[0].subnormal]) - 2, max([*exponents, FORMATS[0].largest]) + 2


def _draw_all(figure: Any, kinds: Mapping[str, Numbers]) -> None:
    panels = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
    low, high = _limits([*kinds.values()])
    for panel, (kind, numbers) in zip(panels, kinds.items(), strict=True):
        shares = {exponent: 100 * count / numbers.elements for exponent, count in numbers.exponents.items()}
        _draw_ranges(panel, low, high)
        # A bar stands for the numbers from its exponent to the next.
        panel.bar([*shares], [*shares.values()], width=0.92, align="edge", color=_COLORS[kind], zorder=3)
        panel.set_title(f"{kind}: {_summary(numbers)}", loc="left", fontsize=9)
        panel.set_ylabel("% of the numbers")
        panel.set_xlim(low, high + 1)
        panel.set_ylim(0, 1.3 * max(shares.values(), default=100))  # room for the strips
    panels[-1].set_xlabel("exponent of 2")
    figure.supxlabel("strips: what a format holds; where they are pale, with fewer digits", fontsize=8)


def _draw_ranges(panel: Any, low: int, high: int) -> None:
    """Draw a strip above the bars for each format: pale where its numbers are subnormal."""
    for place, one in enumerate(FORMATS):
        bottom = 0.9 - 0.1 * place
        for first, last, alpha in ((one.subnormal, one.normal, 0.4), (one.normal, one.largest + 1, 1.0)):
            start, end = max(first, low), min(last, high + 1)
            if start < end:
                panel.axvspan(start, end, bottom, bottom + 0.085, color=_COLORS[one.name], alpha=alpha, lw=0)
                panel.axvline(start, 0, bottom, color=_COLORS[one.name], lw=0.8, zorder=1)
                panel.axvline(end, 0, bottom, color=_COLORS[one.name], lw=0.8, zorder=1)
        middle = (max(one.normal, low) + min(one.largest + 1, high + 1)) / 2
        panel.text(
            middle, bottom + 0.04, one.name, transform=panel.get_xaxis_transform(), ha="center", va="center", fontsize=8
        )


def _summary(numbers: Numbers) -> str:
    parts = [f"{numbers.elements:,} numbers, max {numbers.max_abs:.3g}, min {numbers.min_abs:.3g}"]
    for dtype, loss in numbers.losses.items():
        lost = {"overflow": loss.overflow, "to zero": loss.underflow, "subnormal": loss.subnormal}
        said = ", ".join(f"{what} {100 * share:.2g}%" for what, share in lost.items() if share)
        parts.append(f"{dtype}: {said or 'nothing lost'}")
    return "; ".join(parts)


def _draw_modules(figure: Any, found: Mapping[str, Mapping[str, Numbers]]) -> None:
    kinds = [kind for kind in _KINDS if any(kind in one for one in found.values())]
    low, high = _limits([numbers for one in found.values() for numbers in one.values()])
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        rows = [_row(one.get(kind), low, high) for one in found.values()]
        drawn = panel.imshow(
            rows,
            aspect="auto",
            cmap="Blues",
            vmin=0,
            extent=(low, high + 1, len(rows) - 0.5, -0.5),
            interpolation="none",
        )
        for edge in (FORMATS[0].subnormal, FORMATS[0].normal, FORMATS[0].largest + 1):
            panel.axvline(edge, color="#c8372d", lw=0.8, ls=(0, (3, 2)) if edge == FORMATS[0].normal else "-")
        panel.set_title(kind, loc="left", fontsize=9)
        panel.set_xlabel("exponent of 2")
    panels[0].set_yticks(range(len(found)), [name or "(no module)" for name in found], fontsize=7)
    figure.supxlabel("lines: the range of float16; left of the dashes with fewer digits", fontsize=7)
    figure.colorbar(drawn, ax=[*panels], label="% of a module's numbers", shrink=0.9)


def _row(numbers: Numbers | None, low: int, high: int) -> list[float]:
    counts = numbers.exponents if numbers else {}
    elements = (numbers.elements if numbers else 0) or 1
    return [100 * counts.get(exponent, 0) / elements for exponent in range(low, high + 1)]
