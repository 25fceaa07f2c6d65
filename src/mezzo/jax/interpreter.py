"""The walk over a jaxpr, and rewritten jaxprs of the functions inside of an equation, kept for the next call."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from .internals import (
    Aval,
    ClosedJaxpr,
    Jaxpr,
    Literal,
    aval_of,
    closed_as_function,
    equation_scope,
    last_uses,
    shape_of,
)
from .kernels import Context, apply_equation
from .values import Storage, Value, dtype_of, is_float, known_number

__all__ = ["Mark", "Rewritten", "interpret", "mark_of", "marked", "rewrite", "values_of"]


def interpret(jaxpr: Jaxpr, constants: Sequence[Any], operands: Sequence[Value], context: Context) -> list[Value]:
    """Run a jaxpr under the policy, equation by equation.

    Args:
        jaxpr: The program as traced.
        constants: The arrays of its constants.
        operands: Its inputs.
        context: Where it stands.

    Returns:
        Its results, in the dtypes that they came out in.
    """
    environment = dict(zip(jaxpr.invars, operands, strict=True))
    for variable, constant in zip(jaxpr.constvars, constants, strict=True):
        environment[variable] = Value(constant, storage=Storage.SAME)

    def read(atom: Any) -> Value:
        return _literal(atom) if isinstance(atom, Literal) else environment[atom]

    for index, (equation, dead) in enumerate(zip(jaxpr.eqns, last_uses(jaxpr), strict=True)):
        with equation_scope(equation):
            results = apply_equation(equation, [read(atom) for atom in equation.invars], context.inside(index))
        environment.update(zip(equation.outvars, results, strict=True))
        for variable in dead:
            environment.pop(variable, None)
    return [read(atom) for atom in jaxpr.outvars]


def _literal(atom: Literal) -> Value:
    dtype = dtype_of(atom.aval)
    if shape_of(atom) != () or getattr(dtype, "kind", "") not in "fVbiu":
        return Value(atom.val)
    if not is_float(dtype):
        # An integer may become a float: `jnp.where(mask, x, 0)` casts its 0.
        return Value(atom.val, frozenset({known_number(np.asarray(atom.val))}) if dtype.kind in "biu" else None)
    # As a scalar of the traced dtype: a Python number would take the dtype of its neighbour without being asked.
    with np.errstate(over="ignore"):
        scalar = np.asarray(atom.val).astype(dtype)[()]
    return Value(scalar, frozenset({known_number(scalar)}))


# Functions inside of equations


@dataclass(frozen=True)
class Mark:
    """A `Value` without its array: what a rewritten function depends on, and what it gives."""

    aval: Aval
    constants: frozenset[float] | None
    storage: Storage


@dataclass(frozen=True)
class Rewritten:
    """A function inside of an equation, rewritten for operands of certain dtypes.

    Attributes:
        closed: The new program.
        marks: What its results are.
    """

    closed: ClosedJaxpr
    marks: tuple[Mark, ...]

    @cached_property
    def function(self) -> Callable[..., list[Any]]:
        """The new program as a function of flat arrays."""
        return closed_as_function(self.closed)

    @cached_property
    def compiled(self) -> Callable[..., list[Any]]:
        """The same, compiled where it is not traced."""
        return jax.jit(self.function)

    @property
    def dtypes(self) -> list[Any]:
        """The dtypes of its results."""
        return [dtype_of(mark.aval) for mark in self.marks]


_KEPT = 2048
_kept: OrderedDict[Any, Rewritten] = OrderedDict()
_lock = threading.Lock()
_Key = tuple[int, tuple[Mark, ...], Any]
_keys: dict[int, tuple[weakref.ref[ClosedJaxpr], set[_Key]]] = {}


_gone: deque[int] = deque()


def _forget(identity: int) -> None:
    """Let go of the rewrites of a function that is gone: now, or with the next rewrite if one is being looked up."""
    _gone.append(identity)
    if _lock.acquire(blocking=False):
        try:
            _let_go()
        finally:
            _lock.release()


def _let_go() -> None:
    while _gone:
        _, keys = _keys.pop(_gone.popleft(), (None, set()))
        for key in keys:
            _kept.pop(key, None)


def _keep(closed: ClosedJaxpr, key: _Key, made: Rewritten) -> Rewritten:
    identity = id(closed)
    with _lock:
        _let_go()
        if identity not in _keys:
            # The function may hold large arrays, so a rewrite does not keep it alive.
            _keys[identity] = (weakref.ref(closed, lambda _: _forget(identity)), set())
        _keys[identity][1].add(key)
        found = _kept.setdefault(key, made)
        while len(_kept) > _KEPT:
            oldest, _ = _kept.popitem(last=False)
            _, keys = _keys.get(oldest[0], (None, set()))
            keys.discard(oldest)
        return found


def rewrite(closed: ClosedJaxpr, marks: Sequence[Mark], context: Context) -> Rewritten:
    """Rewrite a function inside of an equation.

    The same function with operands of the same kind gives the same object, so that JAX compiles it once. A rewrite lives as
    long as the original.

    Args:
        closed: The function as traced.
        marks: What it will be called with.
        context: Where it stands.

    Returns:
        The rewritten function.
    """
    marks = tuple(marks)
    if context.record is not None or any(isinstance(constant, jax.core.Tracer) for constant in closed.consts):
        return _rewrite(closed, marks, context)
    key = (id(closed), marks, context.settings)
    with _lock:
        _let_go()
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    made = _rewrite(closed, marks, context)
    if any(isinstance(constant, jax.core.Tracer) for constant in made.closed.consts):
        return made
    return _keep(closed, key, made)


def _rewrite(closed: ClosedJaxpr, marks: tuple[Mark, ...], context: Context) -> Rewritten:
    known: list[tuple[frozenset[float] | None, Storage]] = []

    def rewritten(*arrays: Any) -> list[Any]:
        operands = [Value(array, mark.constants, mark.storage) for array, mark in zip(arrays, marks, strict=True)]
        results = interpret(closed.jaxpr, closed.consts, operands, context)
        # Not the values: their tracers would outlive the trace.
        known[:] = [(value.constants, value.storage) for value in results]
        return [value.array for value in results]

    new = jax.make_jaxpr(rewritten)(*(mark.aval for mark in marks))
    return Rewritten(new, tuple(Mark(aval, *each) for aval, each in zip(new.out_avals, known, strict=True)))


def mark_of(value: Value) -> Mark:
    """Give what a value is, without its array."""
    return Mark(aval_of(value.array), value.constants, value.storage)


def marked(arrays: Sequence[Any], rewritten: Rewritten) -> list[Value]:
    """Give the results of a rewritten function what is known of them."""
    return [Value(array, mark.constants, mark.storage) for array, mark in zip(arrays, rewritten.marks, strict=True)]


def values_of(arrays: Sequence[Any], like: Sequence[Value]) -> list[Value]:
    """Put other arrays in the place of those of some values."""
    return [replace(value, array=array) for array, value in zip(arrays, like, strict=True)]
