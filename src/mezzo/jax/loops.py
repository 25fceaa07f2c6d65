"""Loops and branches: entered, with dtypes that do not depend on how often or which way they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from mezzo.decision import CastPolicy

from .casting import opaque
from .internals import (
    Aval,
    Equation,
    aval_of,
    bind,
    closed_as_function,
    closed_jaxpr,
    is_reference,
    with_constants_as_inputs,
)
from .interpreter import Mark, Rewritten, mark_of, rewrite
from .kernels import Context, handles, record, run_plan
from .values import FLOAT32, Storage, Value, cast, dtype_of, is_float, representable

__all__ = ["has_references"]


@handles("scan")
def _scan(equation: Equation, operands: Sequence[Value], context: Context) -> list[Value]:
    """Enter the body of a scan.

    Carries have the traced dtypes. Found by inference instead, a running sum that starts in lower precision would be kept
    there: over 1000 steps its gradient is wrong by 38 %, against 0.2 %.
    """
    if context.settings.rule("scan") is CastPolicy.OPAQUE or has_references(operands):
        return run_plan(equation, "scan", operands, opaque(equation, ""), context)
    parameters = equation.params
    split, end = parameters["num_consts"], parameters["num_consts"] + parameters["num_carry"]
    closed, carried = parameters["jaxpr"], end - split
    inner = context.inside("scan", "scan")
    constant_marks = [mark_of(value) for value in operands[:split]]
    slices = [
        _abstract(aval, dtype_of(value.array), value.storage)
        for aval, value in zip(closed.in_avals[end:], operands[end:], strict=True)
    ]

    def body_for(dtypes: Sequence[Any]) -> Rewritten:
        carries = [_abstract(aval, dtype) for aval, dtype in zip(closed.in_avals[split:end], dtypes, strict=True)]
        return rewrite(closed, [*constant_marks, *carries, *slices], inner)

    dtypes, body = _carry_dtypes(closed.in_avals[split:end], operands[split:end], body_for, carried, context)
    constants = [value.array for value in operands[:split]]

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body.function(*constants, *carry, *slices)
        return _cast_all(results[:carried], dtypes), results[carried:]

    start = _cast_all([value.array for value in operands[split:end]], dtypes)
    options = {
        name: parameters[name] for name in ("reverse", "length", "unroll", "_split_transpose") if name in parameters
    }
    carry, stacked = lax.scan(step, start, [value.array for value in operands[end:]], **options)
    results = [*carry, *stacked]
    record(equation, "scan", "enter", "", operands, [*constants, *start], results, context)
    return [Value(result) for result in results]


@handles("while")
def _while(equation: Equation, operands: Sequence[Value], context: Context) -> list[Value]:
    """Leave while loops alone, or enter their bodies if asked to; never their conditions.

    Most are solvers that stop at a tolerance. One that stops after 42 iterations in float32 ran to its limit of 5000 in
    bfloat16. A loop with a fixed number of iterations that is differentiable is a scan.
    """
    if not context.settings.enters_while() or has_references(operands):
        return run_plan(equation, "while", operands, opaque(equation, "while body"), context)
    parameters = equation.params
    split = parameters["cond_nconsts"]
    end = split + parameters["body_nconsts"]
    condition, closed = parameters["cond_jaxpr"], parameters["body_jaxpr"]
    inner = context.inside("body", "while")
    avals = closed.in_avals[end - split :]

    def body_for(dtypes: Sequence[Any]) -> Rewritten:
        carries = [_abstract(aval, dtype) for aval, dtype in zip(avals, dtypes, strict=True)]
        return rewrite(closed, [*map(mark_of, operands[split:end]), *carries], inner)

    dtypes, body = _carry_dtypes(avals, operands[end:], body_for, len(avals), context)
    asked = _as_traced([value.array for value in operands[:split]], condition.in_avals[:split])
    constants = [value.array for value in operands[split:end]]
    start = _cast_all([value.array for value in operands[end:]], dtypes)

    def test(*arrays: Any) -> list[Any]:
        return closed_as_function(condition)(*arrays[:split], *_as_traced(arrays[split:], condition.in_avals[split:]))

    def step(*arrays: Any) -> list[Any]:
        return _cast_all(body.function(*arrays), dtypes)

    results = _bind_while(equation, test, asked, step, constants, start)
    record(equation, "while", "enter", "", operands, [*asked, *constants, *start], results, context)
    return [Value(result) for result in results]


def _bind_while(
    equation: Equation,
    test: Callable[..., list[Any]],
    asked: Sequence[Any],
    step: Callable[..., list[Any]],
    constants: Sequence[Any],
    start: Sequence[Any],
) -> list[Any]:
    """Bind the loop again. Not by `lax.while_loop`: one that was mapped by `jax.vmap` asks about all its members."""
    new_test = jax.make_jaxpr(test)(*map(aval_of, (*asked, *start)))
    new_step = jax.make_jaxpr(step)(*map(aval_of, (*constants, *start)))
    return bind(
        equation,
        [*new_test.consts, *asked, *new_step.consts, *constants, *start],
        cond_jaxpr=closed_jaxpr(with_constants_as_inputs(new_test)),
        cond_nconsts=len(new_test.consts) + len(asked),
        body_jaxpr=closed_jaxpr(with_constants_as_inputs(new_step)),
        body_nconsts=len(new_step.consts) + len(constants),
    )


@handles("cond")
def _cond(equation: Equation, operands: Sequence[Value], context: Context) -> list[Value]:
    """Enter all branches. Their results take the widest dtype that one of them gives."""
    if context.settings.rule("cond") is CastPolicy.OPAQUE or has_references(operands):
        return run_plan(equation, "cond", operands, opaque(equation, ""), context)
    index, *others = operands
    branches = [
        rewrite(branch, [mark_of(value) for value in others], context.inside(place, f"cond branch {place}"))
        for place, branch in enumerate(equation.params["branches"])
    ]
    dtypes = [_joined(column) for column in zip(*(branch.marks for branch in branches), strict=True)]
    arrays = [value.array for value in others]
    if equation.params.get("branches_platforms") is not None:
        results = _bind_cond(equation, index.array, branches, dtypes, arrays)
    elif index.array.dtype == jnp.bool_:
        results = lax.cond(index.array, _branch(branches[1], dtypes), _branch(branches[0], dtypes), *arrays)
    else:
        results = lax.switch(index.array, [_branch(branch, dtypes) for branch in branches], *arrays)
    record(equation, "cond", "enter", "", operands, [index.array, *arrays], results, context)
    return [Value(result) for result in results]


def _bind_cond(
    equation: Equation, index: Any, branches: Sequence[Rewritten], dtypes: Sequence[Any], arrays: Sequence[Any]
) -> list[Any]:
    """Bind a choice by platform again: the branches of other platforms must not be compiled."""
    constants = [constant for branch in branches for constant in branch.closed.consts]
    start, closed = 0, []
    for branch in branches:
        own = slice(start, start + len(branch.closed.consts))
        start = own.stop
        inside = closed_as_function(closed_jaxpr(with_constants_as_inputs(branch.closed)))

        def run(*given: Any, own: slice = own, inside: Callable[..., list[Any]] = inside) -> list[Any]:
            return _cast_all(inside(*given[own], *given[len(constants) :]), dtypes)

        closed.append(jax.make_jaxpr(run)(*map(aval_of, (*constants, *arrays))))
    return bind(equation, [index, *constants, *arrays], branches=tuple(closed))


def _branch(branch: Rewritten, dtypes: Sequence[Any]) -> Callable[..., list[Any]]:
    return lambda *arrays: _cast_all(branch.function(*arrays), dtypes)


def _joined(results: Sequence[Mark]) -> Any:
    """Give the widest dtype of what the branches give. A branch that gives literals adapts if they fit."""
    own = [dtype_of(mark.aval) for mark in results if mark.constants is None]
    dtype = _widest(own or [dtype_of(mark.aval) for mark in results])
    numbers = [mark.constants for mark in results if mark.constants is not None]
    fits = not is_float(dtype) or dtype == FLOAT32 or all(representable(each, dtype) for each in numbers)
    return dtype if fits else FLOAT32


# Carries


def _abstract(aval: Aval, dtype: Any, storage: Storage = Storage.NO) -> Mark:
    """Describe what a body takes: as traced, but for the dtype."""
    changed = is_float(dtype) and dtype != aval.dtype
    return Mark(aval.update(dtype=dtype, weak_type=False) if changed else aval, None, storage)


def _carry_dtypes(
    avals: Sequence[Aval],
    start: Sequence[Value],
    body_for: Callable[[Sequence[Any]], Rewritten],
    carried: int,
    context: Context,
) -> tuple[list[Any], Rewritten]:
    """Choose the dtypes of a loop's carries; give the body for them too.

    With ``"fixpoint"`` they start as what comes in, and widen until the body gives back what it takes. Each round widens
    one at least, and none beyond float32, so it ends.
    """
    traced = [dtype_of(aval) for aval in avals]
    if context.settings.carry == "pin":
        return traced, body_for(traced)
    dtypes = [
        dtype_of(value.array) if is_float(dtype) and value.constants is None else dtype
        for value, dtype in zip(start, traced, strict=True)
    ]
    while True:
        body = body_for(dtypes)
        wider = [_widest(pair) for pair in zip(dtypes, body.dtypes[:carried], strict=True)]
        if wider == dtypes:
            return dtypes, body
        dtypes = wider


def has_references(operands: Sequence[Value]) -> bool:
    """Say whether a mutable array goes in: what is written to has the dtype it was made with."""
    return any(is_reference(aval_of(value.array)) for value in operands)


def _widest(dtypes: Sequence[Any]) -> Any:
    """Give the widest of some dtypes, which are equal but for their precision."""
    found = set(dtypes)
    return found.pop() if len(found) == 1 else FLOAT32


def _cast_all(arrays: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    return [
        cast(array, dtype) if is_float(dtype) and is_float(dtype_of(array)) else array
        for array, dtype in zip(arrays, dtypes, strict=True)
    ]


def _as_traced(arrays: Sequence[Any], avals: Sequence[Aval]) -> list[Any]:
    return _cast_all(arrays, [dtype_of(aval) for aval in avals])
