"""Finding the casts to float32 that leave no equation, because the value is float32 already while JAX traces.

Under autocast such a value can be in lower precision, and a rewrite of the traced program cannot see that it was to be
cast. So while a program is traced to be explained, a profile function watches this thread for calls of the public
functions that cast. Where one is asked to make float32 of a float32 tracer, it binds a marker equation to the tracer, whose
result nobody reads: it tells the place of the cast, and what happens to it in the rewrite tells the value's real dtype.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import dtypes, lax
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mezzo.report import SourceLine

from .source_lines import in_jax, in_mezzo, line_of_frame

__all__ = ["CastWatch", "InvisibleCast", "marker_number"]

_MARK = "mezzo.invisible_cast:"

_FORWARDING = frozenset({"meth", "__call__"})
"""Functions of JAX between the user's call and one of those below: of array methods, and of ``jnp.float32(x)``."""


def _code(function: Any) -> CodeType:
    code = inspect.unwrap(function).__code__
    assert isinstance(code, CodeType)
    return code


_CASTS: dict[CodeType, str] = {
    _code(jax.Array.astype): "{}.astype({})",
    _code(jnp.astype): "{}.astype({})",
    _code(jnp.asarray): "jnp.asarray({}, {})",
    _code(jnp.array): "jnp.array({}, {})",
    _code(lax.convert_element_type): "lax.convert_element_type({}, {})",
}
"""Each takes the value as its first argument and the dtype as its second."""

_IDENTITIES = frozenset(map(id, _CASTS))
"""Hashing a code object hashes all of its parts, and this is asked at each call."""


@dataclass(frozen=True)
class InvisibleCast:
    """A cast to float32 that left no equation.

    Attributes:
        spelling: How it was called.
        source: Where: the user's line, also if a library made the call for it.
    """

    spelling: str
    source: SourceLine | None


class _Call(NamedTuple):
    value: Any
    spelling: str
    caller: FrameType


class CastWatch:
    """Marks invisible casts while it is entered, in this thread; a profile function that is set meanwhile rests.

    It may be entered again inside, and one after the other.

    Attributes:
        found: The casts, each at the number that its marker bears.
        works: False if somebody else's profiler was in the way, and casts may be missing.

    Example:
        >>> watch = CastWatch()
        >>> with watch:
        ...     jaxpr = jax.make_jaxpr(lambda x: x.astype("float32") + 1)(jnp.ones(3))
        >>> [equation.primitive.name for equation in jaxpr.eqns], watch.found[0].spelling
        (['name', 'add'], 'x.astype(float32)')
    """

    def __init__(self) -> None:
        self.found: list[InvisibleCast] = []
        self.works = True
        self._previous: list[Any] = []

    def __enter__(self) -> CastWatch:
        """Start."""
        previous = sys.getprofile()
        self._previous.append(previous)
        if _can_be_put_back(previous):
            sys.setprofile(self._look)
        else:
            self.works = False
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stop, and put back the profile function that was set before."""
        previous = self._previous.pop()
        if _can_be_put_back(previous):
            sys.setprofile(previous)

    def _look(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and id(frame.f_code) in _IDENTITIES:
            call = _invisible_cast(frame)
            if call is not None:
                self._mark(call)

    def _mark(self, call: _Call) -> None:
        try:
            checkpoint_name(call.value, f"{_MARK}{len(self.found)}")
        except Exception:  # noqa: BLE001  # a value that cannot be marked must not break the program that is looked at
            return
        self.found.append(InvisibleCast(call.spelling, line_of_frame(call.caller)))


def _can_be_put_back(profiler: Any) -> bool:
    """Say whether Python can be given it again; a profiler written in C is no function."""
    return profiler is None or callable(profiler)


def marker_number(name: object) -> int | None:
    """Read the number of a marker.

    Args:
        name: The parameter ``name`` of an equation of the primitive ``name``.

    Returns:
        The place in `CastWatch.found`; None if it is a name of the user's.

    Example:
        >>> marker_number("mezzo.invisible_cast:3"), marker_number("attention")
        (3, None)
    """
    if not isinstance(name, str) or not name.startswith(_MARK):
        return None
    return int(name.removeprefix(_MARK))


def _invisible_cast(frame: FrameType) -> _Call | None:
    """Read a call that begins; None if it makes an equation, casts to something else, or is JAX's own."""
    value_name, dtype_name = frame.f_code.co_varnames[:2]
    value, dtype = frame.f_locals[value_name], frame.f_locals[dtype_name]
    if not isinstance(value, jax.core.Tracer) or value.dtype != np.float32 or jax.typeof(value).weak_type:
        return None
    caller = _caller(frame)
    if caller is None or not _is_float32(dtype):
        return None
    return _Call(value, _CASTS[frame.f_code].format("x", "float32"), caller)


def _is_float32(dtype: Any) -> bool:
    if dtype is None:
        return False
    try:
        return bool(dtypes.canonicalize_dtype(dtype) == np.float32)
    except TypeError:
        return False


def _caller(frame: FrameType) -> FrameType | None:
    """Find who called from outside of JAX and mezzo, if nothing of either lies between."""
    caller = frame.f_back
    while caller is not None and in_jax(caller.f_code.co_filename):
        if caller.f_code in _CASTS or caller.f_code.co_name not in _FORWARDING:
            return None
        caller = caller.f_back
    if caller is None or in_mezzo(caller.f_code.co_filename):
        return None
    return caller
