"""Casting an operand as planned, so that what comes back in the backward pass adds up in float32."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from .casting import ADDING, is_mask_like, is_repeated
from .internals import Equation, name_stack_text, shape_of
from .values import FLOAT16, FLOAT32, LOW, Storage, Value, cast, dtype_of, is_float

__all__ = ["cast_operand", "repeats_low", "widened"]

_MANY = 8
"""How often a value is repeated for the sum of as many cotangents to need float32."""


def cast_operand(value: Value, target: Any, equation: Equation, primitive: str) -> Any:
    """Cast an operand of an equation.

    Args:
        value: The operand.
        target: The dtype that it is to have.
        equation: The equation that reads it.
        primitive: Its canonical name.

    Returns:
        The array to bind the equation with; already broadcast where that has to come before the cast.
    """
    array, repeated = value.array, is_repeated(value, equation, primitive)
    many = repeated and repeats_low(equation, value)
    if array.dtype == target and not many:
        return array
    if target == FLOAT32:
        return widened(value)
    stored = value.storage is not Storage.NO and array.dtype != target
    if stored and primitive in ADDING and (target == FLOAT16 or is_mask_like(array)):
        array = _bounded(array, target)
    if many or (stored and repeated):
        # Cast after broadcasting: the transpose then adds up the gradient of a bias, or of a gate, in float32.
        shape, array = shape_of(equation.outvars[0]), widened(value) if many else array
        array = lax.broadcast_in_dim(array, shape, tuple(range(len(shape) - array.ndim, len(shape))))
    return cast(array, target)


def widened(value: Value) -> Any:
    """Cast to float32 once for all who read the value: their cotangents then add up in float32."""
    if value.wide is None:
        value.wide = cast(value.array, FLOAT32)
    return value.wide


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _bounded(array: Any, dtype: Any) -> Any:
    """Keep the finite numbers of a mask finite: a row that is masked by -1e9 everywhere must not become NaN.

    Negative numbers beyond the range become 7/16 of the lowest, so that logits can be added to two such masks and what is
    hidden is still zero after a softmax.
    """
    lowest = float(jnp.finfo(dtype).min)
    below = lax.lt(array, jnp.asarray(lowest, array.dtype))
    beyond = lax.bitwise_and(below, lax.is_finite(array))
    return lax.select(beyond, lax.full_like(array, lowest * 7 / 16), array)


@_bounded.defjvp
def _bounded_jvp(dtype: Any, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    # The derivative of a cast: nothing has to be kept for the backward pass.
    return _bounded(primals[0], dtype), tangents[0]


def repeats_low(equation: Equation, value: Value) -> bool:
    """Say whether a low array is repeated so often that a sum of as many cotangents needs float32."""
    array, after = value.array, shape_of(equation.outvars[0])
    differentiable = not value.still and is_float(dtype_of(equation.outvars[0].aval)) and not _is_backward(equation)
    if dtype_of(array) not in LOW.values() or not differentiable:
        return False
    sizes = (*array.shape, *after)
    return all(isinstance(size, int) for size in sizes) and math.prod(after) > _MANY * math.prod(array.shape)


def _is_backward(equation: Equation) -> bool:
    """Say whether an equation is of a backward pass that is rewritten too; few are differentiated again."""
    return "transpose(" in name_stack_text(equation.source_info.name_stack)
