"""Calls of other functions: jit, remat, shard_map and the like are entered and called with what is inside rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from mezzo.decision import CastPolicy

from .casting import opaque
from .internals import ClosedJaxpr, Equation, bind, closed_jaxpr, with_constants_as_inputs
from .interpreter import interpret, mark_of, marked, rewrite, values_of
from .kernels import Context, handles, record, run_plan
from .loops import has_references
from .ops import canonical
from .values import Value

__all__: list[str] = []


def _left_closed(equation: Equation, operands: Sequence[Value], context: Context) -> bool:
    primitive = canonical(equation.primitive.name)
    return context.settings.rule(primitive) is CastPolicy.OPAQUE or has_references(operands)


@handles("jit")
def _jit(equation: Equation, operands: Sequence[Value], context: Context) -> list[Value]:
    """Call a jitted function with its program rewritten; shardings, donation and name stay."""
    if _left_closed(equation, operands, context):
        return run_plan(equation, "jit", operands, opaque(equation, ""), context)
    inner = context.inside("jit", f"jit {equation.params['name']}")
    rewritten = rewrite(equation.params["jaxpr"], [mark_of(value) for value in operands], inner)
    arrays = [value.array for value in operands]
    # What a traced function closes over can be no part of an equation.
    anew = any(isinstance(constant, jax.core.Tracer) for constant in rewritten.closed.consts)
    results = rewritten.compiled(*arrays) if anew else bind(equation, arrays, jaxpr=rewritten.closed)
    record(equation, "jit", "enter", "", operands, arrays, results, context)
    return marked(results, rewritten)


@handles("closed_call", "core_call", "call")
def _inline(equation: Equation, operands: Sequence[Value], context: Context) -> list[Value]:
    """Run what is inside in place: these calls are JAX's own bookkeeping."""
    if _left_closed(equation, operands, context):
        primitive = canonical(equation.primitive.name)
        return run_plan(equation, primitive, operands, opaque(equation, ""), context)
    inside = equation.params["call_jaxpr"]
    jaxpr, constants = (inside.jaxpr, inside.consts) if isinstance(inside, ClosedJaxpr) else (inside, ())
    return interpret(jaxpr, constants, operands, context.inside("call"))


@handles("remat2")
def _remat(equation: Equation, operands: Sequence[Value], context: Context) -> list[Value]:
    """Call a checkpointed function with its program rewritten; what is saved and what is computed again stays."""
    if _left_closed(equation, operands, context):
        return run_plan(equation, "remat2", operands, opaque(equation, ""), context)
    inside = equation.params["jaxpr"]
    closed = inside if isinstance(inside, ClosedJaxpr) else closed_jaxpr(inside)
    rewritten = rewrite(closed, [mark_of(value) for value in operands], context.inside("remat", "remat"))
    arrays = [value.array for value in operands]
    jaxpr = with_constants_as_inputs(rewritten.closed)
    results = bind(equation, [*rewritten.closed.consts, *arrays], jaxpr=jaxpr)
    record(equation, "remat2", "enter", "", operands, arrays, results, context)
    return marked(results, rewritten)


@handles("shard_map")
def _shard_map(equation: Equation, operands: Sequence[Value], context: Context) -> list[Value]:
    """Map the rewritten function over shards. It is rewritten inside, where the axes have names."""
    if _left_closed(equation, operands, context):
        return run_plan(equation, "shard_map", operands, opaque(equation, ""), context)
    parameters = equation.params
    inner = context.inside("shard_map", "shard_map")
    jaxpr = parameters["jaxpr"]

    def body(*arrays: Any) -> tuple[Any, ...]:
        results = interpret(jaxpr, (), values_of(arrays, operands), inner)
        return tuple(value.array for value in results)

    arrays = [value.array for value in operands]
    mapped = jax.shard_map(
        body,
        mesh=parameters["mesh"],
        in_specs=tuple(parameters["in_specs"]),
        out_specs=tuple(parameters["out_specs"]),
        axis_names=set(parameters.get("newly_manual_axes", parameters.get("manual_axes", ()))),
        check_vma=parameters["check_vma"],
    )
    results = mapped(*arrays)
    record(equation, "shard_map", "enter", "", operands, arrays, results, context)
    return [Value(result) for result in results]
