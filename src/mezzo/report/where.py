"""Which records of a report meet some conditions. No framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .records import OpRecord

__all__ = ["condition"]

_TEXTS: dict[str, Callable[[OpRecord], str]] = {
    "reason": lambda record: record.reason,
    "path": lambda record: "/".join(record.path),
    "source": lambda record: f"{record.source.file}:{record.source.line}" if record.source else "",
}
"""What is looked for a part in."""


def condition(wanted: dict[str, Any]) -> Callable[[OpRecord], bool]:
    """Make the test that `mezzo.report.Report.where` does.

    Args:
        wanted: Condition to what is asked for; None asks for nothing. ``reason``, ``path`` and ``source`` look for a part
            of a text, ``dtype`` for one of those used or given, ``module`` for the module or one inside it; any other
            name is an attribute of the record.

    Returns:
        A function that says whether a record meets all of them.

    Example:
        >>> fits = condition({"module": "layers.1", "dot": None})
        >>> [fits(OpRecord("add", "fp32", path=(name,))) for name in ("layers.1", "layers.1.mlp", "layers.10")]
        [True, True, False]
    """
    asked = {name: value for name, value in wanted.items() if value is not None}
    parts = {name: asked.pop(name) for name in _TEXTS if name in asked}
    dtype, module = asked.pop("dtype", None), asked.pop("module", None)

    def fits(record: OpRecord) -> bool:
        return (
            all(getattr(record, name) == value for name, value in asked.items())
            and all(part in _TEXTS[name](record) for name, part in parts.items())
            and (dtype is None or dtype in record.used + record.gave)
            and (module is None or _inside(module, "/".join(record.path)))
        )

    return fits


def _inside(module: str, path: str) -> bool:
    # The parts of a path end at a dot in PyTorch's module names, and at a slash elsewhere.
    return path == module or path.startswith((f"{module}.", f"{module}/"))
