"""What mezzo needs of JAX beyond its public functions, all of it in this file.

Most of it is in `jax.extend`, which JAX keeps for libraries but does not promise to keep still. What is not:
``Primitive.get_bind_params`` (a tuple before JAX 0.9.2, a dictionary with ``subfuns`` since) and ``JaxprEqn.ctx``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend import core, linear_util, source_info_util
from jax.extend.core import primitives

__all__ = [
    "Aval",
    "ClosedJaxpr",
    "Equation",
    "Jaxpr",
    "Literal",
    "Variable",
    "as_weak",
    "aval_of",
    "bind",
    "bind_parameters",
    "canonical_dtype",
    "closed_as_function",
    "closed_jaxpr",
    "equation_scope",
    "function_name",
    "is_reference",
    "last_uses",
    "name_stack_text",
    "rebind",
    "shape_of",
    "source_of",
    "with_constants_as_inputs",
    "wrapped_function",
]

# So that a user's line is named for each equation, in errors of JAX too, and not the line where it is bound again.
source_info_util.register_exclusion(str(Path(__file__).parent))

ClosedJaxpr = core.ClosedJaxpr
Equation = core.JaxprEqn
Jaxpr = core.Jaxpr
Literal = core.Literal
Variable = core.Var
Aval = Any
"""An abstract value: shape, dtype, and whatever else JAX knows of an array before it runs."""


def closed_as_function(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Give a program as a function of flat arrays."""
    function: Callable[..., list[Any]] = core.jaxpr_as_fun(closed)
    return function


def aval_of(array: Any) -> Aval:
    """Give the abstract value of an array, a tracer or a NumPy array."""
    return jax.typeof(array)


def canonical_dtype(dtype: Any) -> Any:
    """Give the dtype that JAX has for another one: float32 for float64, unless 64-bit numbers are enabled."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def as_weak(array: Any) -> Any:
    """Make an array's dtype weak, so that it adapts to others, as that of a Python number does."""
    return primitives.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def is_reference(aval: Aval) -> bool:
    """Say whether an abstract value is that of a mutable array."""
    return hasattr(aval, "inner_aval")


def shape_of(atom: Any) -> tuple[Any, ...]:
    """Give the traced shape of an equation's operand or result; empty for what has none, such as a token."""
    return tuple(getattr(atom.aval, "shape", ()))


def bind_parameters(equation: Equation) -> tuple[list[Any], dict[str, Any]]:
    """Give the functions and the parameters with which an equation's primitive is bound again."""
    found = equation.primitive.get_bind_params(dict(equation.params))
    if isinstance(found, tuple):
        functions, parameters = found
        return list(functions), parameters
    functions = found.pop("subfuns", ())
    return list(functions), found


def bind(equation: Equation, arrays: Sequence[Any], **changed: Any) -> list[Any]:
    """Bind an equation's primitive to other arrays, perhaps with some parameters changed.

    Args:
        equation: The equation.
        arrays: Its operands now.
        **changed: Parameters to replace.

    Returns:
        Its results, as a list in any case.
    """
    primitive = equation.primitive
    found = primitive.get_bind_params(dict(equation.params, **changed))
    if isinstance(found, tuple):
        functions, parameters = found
        results = primitive.bind(*functions, *arrays, **parameters)
    else:
        results = primitive.bind(*arrays, **found)
    return list(results) if primitive.multiple_results else [results]


def rebind(
    equation: Equation, functions: Sequence[Any], arrays: Sequence[Any], parameters: dict[str, Any]
) -> list[Any]:
    """Bind an equation's primitive with other functions; the counterpart of `bind_parameters`."""
    if isinstance(equation.primitive.get_bind_params(dict(equation.params)), tuple):
        results = equation.primitive.bind(*functions, *arrays, **parameters)
    else:
        results = equation.primitive.bind(*arrays, subfuns=tuple(functions), **parameters)
    return list(results)


@contextmanager
def equation_scope(equation: Equation) -> Iterator[None]:
    """Bind as if from where the equation came: its named scopes, its line of source, its configuration."""
    info = equation.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=names), equation.ctx.manager:
        yield


def last_uses(jaxpr: Jaxpr) -> list[list[Any]]:
    """For each equation, the variables that nothing after it reads, so that their arrays can be freed."""
    alive = {variable for variable in jaxpr.outvars if not isinstance(variable, Literal)}
    dead: list[list[Any]] = []
    for equation in reversed(jaxpr.eqns):
        used = {atom for atom in equation.invars if not isinstance(atom, Literal)}
        dead.append([variable for variable in (*used, *equation.outvars) if variable not in alive])
        alive |= used
    return dead[::-1]


@lru_cache(maxsize=4096)
def name_stack_text(stack: source_info_util.NameStack) -> str:
    """Give an equation's named scopes as text."""
    return str(stack)


def source_of(equation: Equation) -> str:
    """Give the user's line that an equation comes from, as ``path:line:column (function)``."""
    return str(source_info_util.summarize(equation.source_info))


def function_name(jaxpr: Jaxpr) -> str:
    """Give the name of the function that a jaxpr was traced from; empty if JAX does not know."""
    described = jaxpr.debug_info.func_src_info if jaxpr.debug_info else None
    return described.split(" ")[0] if described else ""


@lru_cache(maxsize=1024)
def closed_jaxpr(jaxpr: Jaxpr) -> ClosedJaxpr:
    """Close a jaxpr without constants; the same one gives the same object, as JAX does it itself."""
    return ClosedJaxpr(jaxpr, ())


def with_constants_as_inputs(closed: ClosedJaxpr) -> Jaxpr:
    """Give a jaxpr without constants, which takes them before its other inputs."""
    jaxpr: Jaxpr = closed.jaxpr
    if not jaxpr.constvars:
        return jaxpr
    info = jaxpr.debug_info
    if info is not None and info.arg_names is not None:
        info = info._replace(arg_names=(*("",) * len(jaxpr.constvars), *info.arg_names))
    open_jaxpr: Jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=info)
    return open_jaxpr


def wrapped_function(function: Any, like: linear_util.WrappedFun) -> linear_util.WrappedFun:
    """Wrap a function of flat arguments in the way that call primitives want it."""
    return linear_util.wrap_init(function, debug_info=like.debug_info)
