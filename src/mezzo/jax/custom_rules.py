"""Functions with derivatives of their own: both the function and its rule are rewritten, or both are left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from mezzo.decision import CastPolicy

from .casting import opaque, traced_dtypes
from .internals import Equation, bind_parameters, function_name, rebind, wrapped_function
from .interpreter import Mark, Rewritten, interpret, mark_of, rewrite
from .kernels import Context, handles, record, run_plan
from .values import Value, cast, dtype_of, is_float

__all__: list[str] = []


@handles("custom_jvp_call")
def _custom_jvp(equation: Equation, operands: Sequence[Value], context: Context) -> list[Value]:
    """Rewrite a function with a custom JVP and its rule, and tie the two together again.

    Left closed, every relu would turn its activation back into float32; written out, the rule would be lost.
    """
    parameters = equation.params
    if context.settings.rule("custom_jvp_call") is CastPolicy.OPAQUE or parameters["symbolic_zeros"]:
        reason = "custom_jvp with symbolic zeros" if parameters["symbolic_zeros"] else ""
        return run_plan(equation, "custom_jvp_call", operands, opaque(equation, reason), context)
    closed = parameters["call_jaxpr"]
    word = f"custom_jvp {function_name(closed.jaxpr)}".rstrip()
    marks = [mark_of(value) for value in operands]
    primal = rewrite(closed, marks, context.inside("custom_jvp", word))
    function = _with_rule(equation, marks, primal, context.inside("jvp rule", f"{word} rule"))
    arrays = [value.array for value in operands]
    results = function(*arrays)
    record(equation, "custom_jvp_call", "enter", "", operands, arrays, results, context)
    return [Value(result, mark.constants, mark.storage) for result, mark in zip(results, primal.marks, strict=True)]


def _with_rule(
    equation: Equation, marks: Sequence[Mark], primal: Rewritten, context: Context
) -> Callable[..., Sequence[Any]]:
    constants, rule = equation.params["num_consts"], equation.params["jvp_jaxpr_fun"]

    def run(*arrays: Any) -> tuple[Any, ...]:
        return tuple(primal.function(*arrays))

    run.__name__ = function_name(equation.params["call_jaxpr"].jaxpr) or run.__name__
    function = jax.custom_jvp(run)

    @function.defjvp
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        inputs, directions = primals[constants:], tangents[constants:]
        jaxpr, closed_over, zero_outputs = rule.call_wrapped(*[False] * len(inputs))
        values = [
            Value(array, mark.constants, mark.storage) for array, mark in zip(inputs, marks[constants:], strict=True)
        ]
        found = interpret(jaxpr, closed_over, [*values, *map(Value, directions)], context)
        results = [
            cast(value.array, dtype) if is_float(dtype) else value.array
            for value, dtype in zip(found, primal.dtypes, strict=False)
        ]
        return tuple(results), _tangents(found[len(results) :], results, zero_outputs)

    return function


def _tangents(found: Sequence[Value], results: Sequence[Any], zero_outputs: Sequence[bool]) -> tuple[Any, ...]:
    """Give each result its tangent in its own dtype; the rule leaves out those that are zero."""
    remaining = iter(found)
    tangents = []
    for result, is_zero in zip(results, zero_outputs, strict=True):
        if is_zero:
            tangents.append(_zero_tangent(result))
        else:
            array = next(remaining).array
            tangents.append(cast(array, result.dtype) if is_float(dtype_of(array)) else array)
    return tuple(tangents)


def _zero_tangent(result: Any) -> Any:
    if jnp.issubdtype(result.dtype, jnp.inexact):
        return jnp.zeros_like(result)
    return np.zeros(result.shape, jax.dtypes.float0)


@handles("custom_vjp_call")
def _custom_vjp(equation: Equation, operands: Sequence[Value], context: Context) -> list[Value]:
    """Leave a function with a custom VJP alone, or rewrite it with its two rules if asked to.

    Entered, the function, its forward and its backward rule keep the traced dtypes at their borders: the backward rule
    was written for what the forward rule saved.
    """
    closed = equation.params["call_jaxpr"]
    name = function_name(closed.jaxpr)
    if not context.settings.enters_vjp(name):
        plan = opaque(equation, f"opaque custom_vjp {name}".rstrip())
        return run_plan(equation, "custom_vjp_call", operands, plan, context)
    arrays = [
        cast(value.array, dtype) if is_float(dtype) and is_float(dtype_of(value.array)) else value.array
        for value, dtype in zip(operands, traced_dtypes(equation.invars), strict=True)
    ]
    functions, parameters = bind_parameters(equation)
    words = (f"custom_vjp {name}", f"custom_vjp {name} forward", f"custom_vjp {name} backward")
    entered = [
        wrapped_function(_pinned(each.call_wrapped, context.inside(word, word)), each)
        for each, word in zip(functions, words, strict=True)
    ]
    results = rebind(equation, entered, arrays, parameters)
    record(equation, "custom_vjp_call", "enter", "", operands, arrays, results, context)
    return [Value(result) for result in results]


def _pinned(function: Callable[..., Any], context: Context) -> Callable[..., list[Any]]:
    """Rewrite a function of flat arguments when it is called, with its own dtypes at its border.

    Arguments and results may be things that are no arrays: flags, and JAX's zeros.
    """

    def call(*arguments: Any) -> list[Any]:
        places = [place for place, argument in enumerate(arguments) if _is_array(argument)]
        others: dict[int, Any] = {}
        count = 0

        def arrays_only(*arrays: Any) -> list[Any]:
            nonlocal count
            filled = list(arguments)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            results = list(function(*filled))
            count = len(results)
            others.update({place: result for place, result in enumerate(results) if not _is_array(result)})
            return [result for place, result in enumerate(results) if place not in others]

        arrays = [arguments[place] for place in places]
        closed = jax.make_jaxpr(arrays_only)(*arrays)
        found = interpret(closed.jaxpr, closed.consts, [Value(array) for array in arrays], context)
        remaining = iter(
            [
                cast(value.array, aval.dtype) if is_float(dtype_of(aval)) else value.array
                for value, aval in zip(found, closed.out_avals, strict=True)
            ]
        )
        return [others[place] if place in others else next(remaining) for place in range(count)]

    return call


def _is_array(thing: Any) -> bool:
    return isinstance(thing, jax.Array) or (hasattr(thing, "dtype") and hasattr(thing, "__array__"))
