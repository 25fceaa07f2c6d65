"""What is known of an equation's results: numbers made of literals, and stored arrays whose elements were only moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .casting import Plan
from .internals import Equation, shape_of
from .ops import canonical, traits
from .values import Storage, Value, combine, dtype_of, is_float

__all__ = ["marked_results"]


def marked_results(
    equation: Equation, primitive: str, operands: Sequence[Value], results: Sequence[Any], plan: Plan
) -> list[Value]:
    """Give the results of an equation what is known of them.

    Args:
        equation: The equation.
        primitive: Its canonical name.
        operands: What it read.
        results: The arrays that it gave.
        plan: How it was bound.

    Returns:
        The results as values.
    """
    if "moves" in traits(primitive):
        sources = operands if len(operands) == len(results) > 1 else [operands[0]] * len(results)
        return [
            replace(
                source,
                array=result,
                storage=_moved(equation, source),
                still=source.still or primitive == "stop_gradient",
            )
            for source, result in zip(sources, results, strict=True)
        ]
    if plan.reason == "literals only":
        numbers = _constants(equation, primitive, operands)
        return [Value(result, numbers if is_float(dtype_of(result)) else None) for result in results]
    return [Value(result) for result in results]


def _constants(equation: Equation, primitive: str, operands: Sequence[Value]) -> frozenset[float] | None:
    numbers = [value.constants for value in operands if is_float(dtype_of(value.array)) and value.constants is not None]
    if primitive != "select_n" and len(numbers) != len(operands):
        return None  # such as a power with an array of integers
    return combine(primitive, numbers, **equation.params)


def _moved(equation: Equation, operand: Value) -> Storage:
    """Say whether what was stored is repeated now."""
    if operand.storage is not Storage.SAME:
        return operand.storage
    before = [size for size in operand.array.shape if size != 1]
    after = [size for size in shape_of(equation.outvars[0]) if size != 1]
    grows = canonical(equation.primitive.name) in ("broadcast_in_dim", "broadcast_to", "tile") and before != after
    return Storage.REPEATED if grows else Storage.SAME
