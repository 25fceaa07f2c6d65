"""Tracebacks without the frames of what watches: an op that fails is told as if nobody had looked on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import TracebackType

import mezzo

from . import run_rounds

__all__ = ["chained", "entries", "file_of", "shorten_others", "without_watchers"]

_PACKAGE = os.path.dirname(mezzo.__file__)  # noqa: PTH120 - as frames have it, not normalized
_WATCHING = frozenset(
    [
        *(
            os.path.join(_PACKAGE, "torch", *f"{name}.py".split("/"))  # noqa: PTH118 - as above
            for name in (
                "recording/listed_ops",
                "recording/module_stack",
                "recording/recorder",
                "searching/search",
                "shadowing/shadow",
                "watch_mode",
            )
        ),
        os.path.join(os.path.dirname(run_rounds.__file__), "run_search.py"),  # noqa: PTH118, PTH120 - as above
    ]
)
_GLUE = tuple(os.path.join("torch", *parts) for parts in (("_compile.py",), ("_dynamo", "eval_frame.py")))  # noqa: PTH118
"""Files of PyTorch's from which it calls a dispatch mode."""

_CALLS = os.path.join("torch", "_ops.py")  # noqa: PTH118
"""The file of PyTorch's in which a mode calls the op."""


def entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Give the entries of a traceback, the outermost first."""
    while trace is not None:
        yield trace
        trace = trace.tb_next


def file_of(entry: TracebackType) -> str:
    """Give the file of an entry's code."""
    return entry.tb_frame.f_code.co_filename


def chained(shown: Sequence[TracebackType]) -> TracebackType | None:
    """Make a traceback of some entries; None if there are none."""
    result = None
    for entry in reversed(shown):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def without_watchers(trace: TracebackType | None) -> TracebackType | None:
    """Take out the frames of what watches ops, and those of PyTorch's that lead to it and from it.

    Args:
        trace: A traceback, outermost frame first.

    Returns:
        The traceback as it is without watching, but for frames of modules, which PyTorch calls in another way then.

    Example:
        >>> without_watchers(None) is None
        True
    """
    shown: list[TracebackType] = []
    inside = False
    for entry in entries(trace):
        file = file_of(entry)
        if file in _WATCHING:
            inside = True
            while shown and file_of(shown[-1]).endswith(_GLUE):
                shown.pop()
        elif not (inside and file.endswith((*_GLUE, _CALLS))):
            inside = False
            shown.append(entry)
    return chained(shown)


def shorten_others(error: BaseException) -> None:
    """Do the same with the exceptions that an exception came from, or in whose handling it was raised.

    Args:
        error: The exception; its own traceback stays.
    """
    seen = {id(error)}
    left = [error.__cause__, error.__context__]
    while left:
        other = left.pop()
        if other is not None and id(other) not in seen:
            seen.add(id(other))
            BaseException.with_traceback(other, without_watchers(other.__traceback__))
            left += [other.__cause__, other.__context__]
