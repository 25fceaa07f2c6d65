"""Which line of the user's an equation, or a running frame, comes from."""

from __future__ import annotations

import itertools
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from types import FrameType

import jax

from mezzo.report import SourceLine

from .internals import Equation, source_of

__all__ = ["in_jax", "in_mezzo", "line_of_equation", "line_of_frame"]

_LIBRARIES = frozenset({"flax", "haiku", "equinox", "optax", "chex", "penzai", "jmp"})
"""Between these and JAX lies nothing that their users have written; the line that calls them says more."""

_JAX = f"{Path(jax.__file__).parent}/"
_MEZZO = f"{Path(__file__).parents[1]}/"
_PYTHON = f"{sysconfig.get_paths()['stdlib']}/"
_SUMMARY = re.compile(r"(?P<file>.*?):(?P<line>\d+)(:\d+)? \((?P<function>.*)\)")


def in_jax(file: str) -> bool:
    """Say whether a file is a part of JAX."""
    return file.startswith(_JAX)


def in_mezzo(file: str) -> bool:
    """Say whether a file is a part of mezzo."""
    return file.startswith(_MEZZO)


def line_of_equation(equation: Equation) -> SourceLine | None:
    """Find the line that an equation comes from.

    Args:
        equation: An equation of a jaxpr.

    Returns:
        The innermost line outside of JAX, mezzo, and the libraries whose users seldom look inside, such as flax; if there is
        none, the innermost outside of JAX. None if JAX kept no traceback.

    Example:
        >>> import jax.numpy as jnp
        >>> def double(x):
        ...     return x + x
        >>> line_of_equation(jax.make_jaxpr(double)(jnp.ones(3)).eqns[0]).function
        'double'
    """
    traceback = equation.source_info.traceback
    frames = getattr(traceback, "frames", ())
    found = _choose(SourceLine(frame.file_name, frame.line_num, frame.function_name) for frame in frames)
    return found or _summary(equation)


def line_of_frame(frame: FrameType) -> SourceLine | None:
    """Find the line that runs, in the same way.

    Args:
        frame: The innermost frame.

    Returns:
        The line; None if all of the stack is JAX's or mezzo's.
    """
    return _choose(_lines(frame))


def _lines(frame: FrameType | None) -> Iterator[SourceLine]:
    while frame is not None:
        yield SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def _choose(lines: Iterable[SourceLine]) -> SourceLine | None:
    second = None
    for line in lines:
        if in_jax(line.file) or in_mezzo(line.file) or _in_python(line.file):
            continue
        if not _in_library(line.file):
            return line
        second = second or line
    return second


def _in_python(file: str) -> bool:
    """Say whether a file is Python's own, such as the wrappers of decorators in ``contextlib``."""
    return file.startswith("<frozen ") or (file.startswith(_PYTHON) and "-packages" not in file)


def _in_library(file: str) -> bool:
    parts = PurePath(file).parts
    return any(
        parent in ("site-packages", "dist-packages") and package in _LIBRARIES
        for parent, package in itertools.pairwise(parts)
    )


def _summary(equation: Equation) -> SourceLine | None:
    match = _SUMMARY.fullmatch(source_of(equation))
    return SourceLine(match["file"], int(match["line"]), match["function"]) if match else None
