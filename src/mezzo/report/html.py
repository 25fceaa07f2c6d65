"""A report as one HTML file that needs nothing else: no network, no other file, no library.

The parts of the page lie in ``page``. The text of a report goes in as data, and the page's program writes it with
text nodes alone; a Content-Security-Policy lets that one program and that one style sheet in, and nothing from outside.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from .html_data import plain, report_data
from .nonfinite import NonFiniteReport
from .report import Report

__all__ = ["page"]

_SCRIPTS = (
    "elements.js",
    "format.js",
    "rows.js",
    "filters.js",
    "head.js",
    "tree.js",
    "byop.js",
    "table.js",
    "details.js",
    "nonfinite.js",
    "plots.js",
    "exponents.js",
    "main.js",
)
_STYLES = ("page.css", "head.css", "lists.css", "plots.css", "table.css", "nonfinite.css")


def page(report: Report | NonFiniteReport) -> str:
    """Write a report as an HTML page.

    Whoever opens it needs a browser with JavaScript; without, it shows the findings and notes alone. It sends nothing and
    asks for nothing. The same report gives the same page. Threads may call it at once.

    Args:
        report: What ``explain`` gave, or what ``find_nonfinite`` found.

    Returns:
        The whole file; write it as UTF-8.

    Raises:
        TypeError: It is neither, such as the ``explain`` or ``find_nonfinite`` that holds it.

    Example:
        >>> from mezzo.report import Report
        >>> text = page(Report("net", "torch", notes=("1 < 2",)))
        >>> text.splitlines()[0], "1 < 2" in text, "1 &lt; 2" in text
        ('<!doctype html>', False, True)
    """
    if isinstance(report, NonFiniteReport):
        text = str(report)
        return _document(text.partition("\n")[0], {"kind": "nonfinite", **plain(report.as_dict())}, text)
    if not isinstance(report, Report):
        msg = f"page() takes a Report or a NonFiniteReport, got {type(report).__name__}; hand its .report over."
        raise TypeError(msg)
    return _document(report.title, {"kind": "report", **report_data(report)}, _text(report))


def _document(title: str, data: dict[str, Any], text: str) -> str:
    script, style = _parts(_SCRIPTS), _parts(_STYLES)
    values = {
        "title": escape(title),
        "policy": escape(_policy(script, style)),
        "style": style,
        "text": escape(text),
        "data": _embedded(data),
        "script": script,
    }
    # Split, and not replaced one after the other: a title that reads "{{script}}" stays one.
    first, *rest = _part("page.html").split("{{")
    parts = [first]
    for piece in rest:
        name, _, after = piece.partition("}}")
        parts += [values[name], after]
    # A file name may hold bytes that are no text; a page has none.
    return "".join(parts).encode("utf-8", "replace").decode("utf-8")


def _text(report: Report) -> str:
    """Write what matters most for a browser without JavaScript. The table of ops would take longer than the page."""
    lines = [f"{finding.kind}: {finding}\n  {finding.advice}".rstrip() for finding in report.warnings]
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def _policy(script: str, style: str) -> str:
    """Let in what is in the page, by its hash, and nothing else."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: dict[str, Any]) -> str:
    """Write data so that it ends no element and starts none, whatever its texts are."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _parts(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join(_part(name) for name in names)


@cache
def _part(name: str) -> str:
    return (files("mezzo.report") / "page" / name).read_text(encoding="utf-8")
