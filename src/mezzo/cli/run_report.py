"""What ``mezzo run`` says when the script has ended: on stderr, and in the file that was asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from mezzo.report import Report
from mezzo.report.html import page
from mezzo.report.nonfinite import NonFiniteReport
from mezzo.report.saving import json_text, replace_file

from .lint_view import joined, show_lint
from .report_view import show
from .run_plan import RunPlan
from .run_watch import Watch

__all__ = ["place_of", "write_report"]

_WIDTH = 120
"""Of lines that go to a file or a pipe, if COLUMNS does not say."""


def place_of(report: Path, rank: str | None) -> Path:
    """Say where a process writes its report: each rank of a group has a file of its own.

    Args:
        report: The file that was asked for.
        rank: The process's rank; None if it is alone.

    Returns:
        The file.

    Example:
        >>> place_of(Path("out.html"), "3").name
        'out.rank3.html'
    """
    return report if rank is None else report.with_suffix(f".rank{rank}{report.suffix}")


def write_report(plan: RunPlan, watch: Watch) -> None:
    """Save and show what was seen.

    Of a group that ``torchrun`` has started, rank 0 alone shows its report; the others show what is not finite.

    Args:
        plan: What was asked for.
        watch: What was seen; closed.
    """
    saved = [*_saved(plan, watch)] if watch.started else []
    for stream in (sys.stdout, sys.stderr):
        # The script's text comes first. A stream that is gone is not missed: Python has its own word on that at the end.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    error = sys.__stderr__
    if error is None or error.closed:
        return
    console = _Console(file=error, highlight=False, width=None if error.isatty() else _width())
    with suppress(OSError):  # nobody reads it any more
        _show(plan, watch, console)
        for text in saved:
            _say(console, text)
        error.flush()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Go on, where rich would end the process and send the script's stdout to nowhere."""
        raise BrokenPipeError


def _show(plan: RunPlan, watch: Watch, console: Console) -> None:
    if not watch.started:
        _say(console, "the script has not imported torch, so there is nothing to report")
        return
    first = _rank() in (None, "0")
    if first and watch.report is not None:
        _show_report(plan, watch.report, console)
    if watch.nonfinite is not None and (first or watch.nonfinite.first is not None):
        console.print(str(watch.nonfinite), markup=False, soft_wrap=True)
    if first and watch.report is None and watch.nonfinite is None:
        _say(console, "the lint has found nothing")


def _show_report(plan: RunPlan, report: Report, console: Console) -> None:
    if plan.explain:
        show(joined(report), console)
    elif plan.lint:
        show_lint(report, console)
    else:
        for note in report.notes:
            _say(console, note)


def _width() -> int | None:
    """Give the width of lines that go to a file or a pipe: None is what COLUMNS says."""
    return None if os.environ.get("COLUMNS", "").isdigit() else _WIDTH


def _saved(plan: RunPlan, watch: Watch) -> Iterator[str]:
    for path, one in _files(plan, watch, _rank()):
        try:
            _save(path, one)
        except (OSError, ValueError) as error:
            yield f"the report could not be saved: {error}"
        else:
            yield f"the report is in {path}"


def _files(plan: RunPlan, watch: Watch, rank: str | None) -> Iterator[tuple[Path, Report | NonFiniteReport]]:
    if plan.report is None:
        return
    path = place_of(plan.report, rank)
    if watch.report is not None:
        yield path, watch.report
    if watch.nonfinite is not None:
        yield path if watch.report is None else path.with_suffix(f".nonfinite{path.suffix}"), watch.nonfinite


def _save(path: Path, report: Report | NonFiniteReport) -> None:
    if isinstance(report, Report):
        report.save(path)
        return
    texts = {".json": lambda: json_text(report.as_dict()) + "\n", ".html": lambda: page(report)}
    replace_file(path, texts.get(path.suffix.lower(), lambda: f"{report}\n")())


def _say(console: Console, text: str) -> None:
    console.print(f"mezzo: {text}", markup=False, soft_wrap=True)


def _rank() -> str | None:
    return os.environ.get("RANK") if os.environ.get("WORLD_SIZE", "1") != "1" else None
