"""Write a report to a file: JSON, a page of HTML, or text, as the file's name ends. No framework."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from .html_data import plain
from .text import report_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from .report import Report

__all__ = ["json_text", "replace_file", "save_report"]

_WIDTH = 120


def save_report(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write a report to a file; what `mezzo.report.Report.save` calls.

    Args:
        report: The report.
        path: The file. An older one of the name is replaced, and only once the whole of the new one is written.

    Returns:
        The path.

    Raises:
        ValueError: The name ends neither in ``.json``, ``.html`` nor ``.txt``. Nothing is written.
        OSError: The file cannot be written, such as into a folder that does not exist.

    Example:
        >>> import tempfile
        >>> from mezzo.report import Report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(save_report(Report("loss", "jax"), Path(folder) / "loss.txt").read_text())
        loss: nothing to report
        <BLANKLINE>
    """
    path = Path(path)
    write = _WRITERS.get(path.suffix.lower())
    if write is None:
        msg = (
            f"A report is saved as {', '.join(_WRITERS)}, by how the file's name ends; got {str(path)!r}. "
            f"Call it {str(path.with_suffix('.html'))!r} for a page to look at."
        )
        raise ValueError(msg)
    replace_file(path, write(report))
    return path


def replace_file(path: Path, text: str) -> None:
    r"""Write a text to a file at one stroke: whole, or not at all.

    Args:
        path: The file.
        text: What to write, in UTF-8. What has no place there becomes an escape: a file's name need not be text.

    Raises:
        OSError: The file cannot be written. An older one of the name is still there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     replace_file(Path(folder) / "a.txt", "\udcff")
        ...     (Path(folder) / "a.txt").read_text()
        '\\udcff'
    """
    # The folder is the same, since a file is replaced at one stroke only within a file system.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def json_text(data: object) -> str:
    """Write plain data as JSON that any reader takes.

    Args:
        data: Dictionaries with strings as keys, lists, strings, numbers, booleans and None.

    Returns:
        The text, in ASCII. JSON has no Inf and NaN: such floats become the strings ``"Infinity"``, ``"-Infinity"`` and
        ``"NaN"``, which JavaScript's ``Number`` and Python's ``float`` read.

    Example:
        >>> json_text({"error": float("inf"), "casts": [1, 0.5]})
        '{"error": "Infinity", "casts": [1, 0.5]}'
    """
    try:
        return json.dumps(data, allow_nan=False)
    except ValueError:
        return json.dumps(plain(data), allow_nan=False)


def _as_json(report: Report) -> str:
    return json_text(report.as_dict()) + "\n"


def _as_html(report: Report) -> str:
    from .html import page  # noqa: PLC0415 - the page is needed by those alone who ask for it

    return page(report)


def _as_text(report: Report) -> str:
    return report_text(report, width=_WIDTH) + "\n"


_WRITERS: dict[str, Callable[[Report], str]] = {".json": _as_json, ".html": _as_html, ".txt": _as_text}
