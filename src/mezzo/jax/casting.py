"""Who casts this equation, and why: the plan for each equation, as a pure function of policy, primitive and values.

`mezzo.decision.input_dtypes` says what a rule does to dtypes. Three things come on top in JAX, since a jaxpr does not say
what a dtype meant: literals adapt to their neighbours if these can hold them; a stored float32 operand that is
broadcast (a bias, a scale, a mask) adapts to a low activation; and products that ask for a precision are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax import lax

from mezzo.decision import CastPolicy

from .internals import Equation, aval_of, shape_of
from .ops import traits
from .settings import Settings
from .values import FLOAT32, Storage, Value, dtype_name, dtype_of, is_float, obstacle, representable

__all__ = ["ADDING", "Plan", "is_mask_like", "is_repeated", "opaque", "plan_equation", "traced_dtypes"]

ADDING = frozenset({"add", "sub"})
"""Primitives by which masks are applied."""

# Primitives whose operands JAX lets broadcast along dimensions of size one.
_ELEMENTWISE = frozenset(
    "add sub mul div rem max min clamp select_n eq ne lt le gt ge eq_to le_to lt_to nextafter pow atan2".split()
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How an equation is to be bound.

    Attributes:
        rule: The cast policy that is applied, or ``"no floats"``.
        reason: Why that is not the policy's rule; empty if it is.
        targets: The dtype for each operand; None leaves it as it is.
        parameters: The equation's parameters that change.
    """

    rule: str
    reason: str
    targets: Sequence[Any]
    parameters: dict[str, Any] = field(default_factory=dict)


def traced_dtypes(atoms: Sequence[Any]) -> list[Any]:
    """Give the dtypes of an equation's operands or results as they were traced; None where there is none."""
    return [dtype_of(atom.aval) for atom in atoms]


def opaque(equation: Equation, reason: str) -> Plan:
    """Plan to bind an equation in exactly the traced dtypes."""
    targets = [dtype if is_float(dtype) else None for dtype in traced_dtypes(equation.invars)]
    return Plan(CastPolicy.OPAQUE, reason, targets)


def plan_equation(equation: Equation, primitive: str, operands: Sequence[Value], settings: Settings) -> Plan:
    """Decide in which dtypes an equation runs.

    Args:
        equation: The equation; not one that encloses others.
        primitive: Its canonical name.
        operands: Its operands as they are now.
        settings: What autocast was asked for.

    Returns:
        The plan. Pure: nothing is bound.
    """
    traced = traced_dtypes(equation.invars)
    for dtype in traced:
        if why := obstacle(dtype):
            return opaque(equation, why)
    if not any(is_float(dtype) for dtype in traced):
        return Plan("no floats", "", [None] * len(operands))
    rule, reason = settings.rule(primitive), ""
    if rule is CastPolicy.OPAQUE:
        return opaque(equation, "")
    if "dot" in traits(primitive) and (why := _left_alone(equation, traced)):
        return opaque(equation, why)
    if primitive == "mul" and equation.invars[0] is equation.invars[1] and rule is CastPolicy.PROMOTE:
        rule, reason = CastPolicy.FP32, "x * x, which is a square"
    if rule is not CastPolicy.LOWER_PRECISION_FP and _all_constant(operands):
        return Plan(CastPolicy.OPAQUE, "literals only", [dtype if is_float(dtype) else None for dtype in traced])
    if rule is CastPolicy.LOWER_PRECISION_FP and not _literals_fit(operands, settings.low):
        rule, reason = CastPolicy.FP32, f"a literal that {settings.dtype} does not hold"
    targets = _targets(rule, equation, primitive, operands, settings)
    if _has_body(equation) and any(new is not None and new != old for new, old in zip(targets, traced, strict=True)):
        return opaque(equation, "it combines by a function that was traced in these dtypes")
    return Plan(rule, reason, targets, _product_dtype(equation, operands, targets))


def _has_body(equation: Equation) -> bool:
    """Say whether a scatter computes: its function is part of the equation, and is not cast."""
    body = equation.params.get("update_jaxpr")
    return body is not None and bool(getattr(body, "eqns", ()))


def _literals_fit(operands: Sequence[Value], dtype: Any) -> bool:
    return all(representable(value.constants, dtype) for value in _floats(operands) if value.constants is not None)


def _floats(operands: Sequence[Value]) -> list[Value]:
    return [value for value in operands if is_float(dtype_of(value.array))]


def _targets(
    rule: CastPolicy, equation: Equation, primitive: str, operands: Sequence[Value], settings: Settings
) -> list[Any]:
    target: Any = None
    if rule is CastPolicy.LOWER_PRECISION_FP:
        target = settings.low
    elif rule is CastPolicy.FP32:
        target = FLOAT32
    elif rule is CastPolicy.PROMOTE:
        target = _promoted(equation, primitive, operands, settings)
    elif rule is CastPolicy.FALLTHROUGH:
        target = _agreed(equation, primitive, operands, settings)
    return [target if is_float(dtype_of(value.array)) else None for value in operands]


def _agreed(equation: Equation, primitive: str, operands: Sequence[Value], settings: Settings) -> Any:
    """Find the dtype for operands that are left as they are, if they cannot be; else None."""
    fill = equation.params.get("fill_value")
    if fill is not None and not _fill_fits(float(fill), operands):
        return FLOAT32
    if not _came_apart(equation, primitive, operands):
        return None
    first = operands[0]
    if "follows" not in traits(primitive) or settings.dtype == "float16":
        return _promoted(equation, primitive, operands, settings)
    # A buffer that is made of literals has no dtype of its own but the one that was traced.
    return first.array.dtype if first.constants is None else dtype_of(equation.invars[0].aval)


def _fill_fits(fill: float, operands: Sequence[Value]) -> bool:
    low = [value.array.dtype for value in _floats(operands) if value.array.dtype != FLOAT32]
    return all(representable(frozenset({fill}), dtype) for dtype in low)


def _all_constant(operands: Sequence[Value]) -> bool:
    return all(value.constants is not None for value in _floats(operands))


def _came_apart(equation: Equation, primitive: str, operands: Sequence[Value]) -> bool:
    """Say whether float operands that had one dtype in the trace have several now, though they must agree."""
    if "independent" in traits(primitive):
        return False
    now = {value.array.dtype for value in operands if is_float(dtype_of(value.array))}
    then = {dtype for dtype in traced_dtypes(equation.invars) if is_float(dtype)}
    return len(now) > 1 and len(then) == 1


def _promoted(equation: Equation, primitive: str, operands: Sequence[Value], settings: Settings) -> Any:
    """Find the widest dtype among the operands that have one of their own."""
    floats = _floats(operands)
    own = [value for value in floats if value.constants is None]
    firm = [value for value in own if not _adapts(value, equation, primitive, settings)]
    dtypes = {value.array.dtype for value in firm or own}
    target = dtypes.pop() if len(dtypes) == 1 else FLOAT32
    return target if target == FLOAT32 or _literals_fit(operands, target) else FLOAT32


def _adapts(value: Value, equation: Equation, primitive: str, settings: Settings) -> bool:
    """Say whether a stored operand takes the dtype of the activation that it is broadcast against.

    A stored scalar does not: it may be a loss scale, which no lower precision holds. A Python number that came through
    `jax.jit` does in bfloat16, which has float32's range: JAX knows it by its weak type, and adapts it too.
    """
    if settings.bias != "adapt" or value.storage is Storage.NO:
        return False
    if value.array.ndim == 0:
        return settings.dtype == "bfloat16" and bool(getattr(aval_of(value.array), "weak_type", False))
    return value.storage is Storage.REPEATED or is_repeated(value, equation, primitive)


def is_repeated(value: Value, equation: Equation, primitive: str) -> bool:
    """Say whether an equation broadcasts this operand."""
    return primitive in _ELEMENTWISE and tuple(value.array.shape) != shape_of(equation.outvars[0])


def is_mask_like(array: Any) -> bool:
    """Say whether a stored array may be an additive mask: it differs from query to query. A bias has one dimension."""
    shape = array.shape
    wide = [size for size in shape if size != 1]
    return len(wide) > 1 or (len(wide) == 1 and len(shape) > 1 and shape[-1] == 1 and shape[-2] != 1)


# Products


def _left_alone(equation: Equation, traced: Sequence[Any]) -> str:
    """Say why a product is none of autocast's business; empty if it is."""
    asked = equation.params.get("precision")
    asked = asked if isinstance(asked, tuple) else (asked,)
    explicit = [str(each) for each in asked if each is not None and each != lax.Precision.DEFAULT]
    if explicit:
        return f"precision={explicit[0].rpartition('.')[2]}"
    if any(dtype.itemsize == 1 for dtype in traced if dtype is not None):
        return "8-bit operand"
    if all(dtype != FLOAT32 for dtype in traced if is_float(dtype)):
        return "already low"
    result = dtype_of(equation.outvars[0].aval)
    return "" if is_float(result) else f"{dtype_name(result)} result"


def _product_dtype(equation: Equation, operands: Sequence[Value], targets: Sequence[Any]) -> dict[str, Any]:
    """Rewrite the result dtype of a product, which is traced as float32.

    Left alone, the transposed product of the backward pass would be one of a float32 and a low operand, in full precision.
    """
    if "preferred_element_type" not in equation.params:
        return {}
    dtypes = {
        value.array.dtype if target is None else target
        for value, target in zip(operands, targets, strict=True)
        if is_float(dtype_of(value.array))
    }
    return {"preferred_element_type": dtypes.pop() if len(dtypes) == 1 else FLOAT32}
