"""How an equation is caught: its plan is carried out, or it is handed to what knows how to enter it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import numpy as jnp

from mezzo.decision import CastPolicy
from mezzo.errors import BannedOpError

from .casting import Plan, opaque, plan_equation, traced_dtypes
from .internals import Equation, bind, name_stack_text, shape_of, source_of
from .observing import Event
from .operand_casts import cast_operand, repeats_low, widened
from .ops import canonical, is_known, warn_unknown
from .results import marked_results
from .scopes import AUTOCAST, DISABLED
from .settings import Settings
from .values import Value, cast, dtype_name, dtype_of, is_float, rounded

__all__ = ["Context", "Handler", "apply_equation", "handles", "run_plan"]


@dataclass(frozen=True, slots=True)
class Context:
    """Where the rewrite is.

    Attributes:
        settings: What autocast was asked for.
        record: What takes the events; None if nobody watches.
        key: The places of the enclosing equations, and of this one.
        path: The enclosing equations in words.
    """

    settings: Settings
    record: Callable[[Event], None] | None = None
    key: tuple[Any, ...] = ()
    path: tuple[str, ...] = ()

    def inside(self, place: Any, word: str = "") -> Context:
        """Give the context of a jaxpr inside of an equation."""
        if self.record is None:
            return self
        return replace(self, key=(*self.key, place), path=(*self.path, word) if word else self.path)


Handler = Callable[[Equation, Sequence[Value], Context], list[Value]]
_HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Make a function the one that enters certain primitives."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def apply_equation(equation: Equation, operands: Sequence[Value], context: Context) -> list[Value]:
    """Bind one equation of the traced program under the policy.

    Args:
        equation: The equation.
        operands: Its operands as they are now.
        context: Where it stands.

    Returns:
        Its results.

    Raises:
        BannedOpError: The policy bans it.
    """
    primitive = canonical(equation.primitive.name)
    scopes = name_stack_text(equation.source_info.name_stack)
    if DISABLED in scopes:
        return run_plan(equation, primitive, operands, opaque(equation, "disabled()"), context)
    if AUTOCAST in scopes:
        return run_plan(equation, primitive, operands, opaque(equation, "inside another autocast"), context)
    _refuse_banned(equation, primitive, operands, context.settings)
    handler = _HANDLERS.get(primitive)
    if handler is not None:
        return handler(equation, operands, context)
    if not is_known(primitive):
        warn_unknown(primitive)
        return run_plan(equation, primitive, operands, opaque(equation, "unknown primitive"), context)
    return run_plan(
        equation, primitive, operands, plan_equation(equation, primitive, operands, context.settings), context
    )


def run_plan(
    equation: Equation, primitive: str, operands: Sequence[Value], plan: Plan, context: Context
) -> list[Value]:
    """Cast the operands as planned, bind the equation, and mark the results."""
    arrays = [
        value.array if target is None else cast_operand(value, target, equation, primitive)
        for value, target in zip(operands, plan.targets, strict=True)
    ]
    results = _bind(equation, primitive, operands, arrays, plan)
    if context.record is not None:
        record(equation, primitive, plan.rule, plan.reason, operands, arrays, results, context)
    return marked_results(equation, primitive, operands, results, plan)


def _bind(
    equation: Equation, primitive: str, operands: Sequence[Value], arrays: Sequence[Any], plan: Plan
) -> list[Any]:
    if primitive == "broadcast_in_dim" and repeats_low(equation, operands[0]):
        # Repeated in float32, so that the transpose adds up in float32.
        wide = bind(equation, [widened(operands[0]), *arrays[1:]], **plan.parameters)
        return [cast(each, operands[0].array.dtype) for each in wide]
    return bind(equation, arrays, **plan.parameters)


def record(
    equation: Equation,
    primitive: str,
    rule: str,
    reason: str,
    operands: Sequence[Value],
    arrays: Sequence[Any],
    results: Sequence[Any],
    context: Context,
) -> None:
    """Tell the observer what was done with an equation."""
    if context.record is None:
        return
    event = Event(
        key=context.key,
        path=context.path,
        primitive=primitive,
        rule=str(rule),
        reason=reason,
        traced_in=_names(atom.aval for atom in equation.invars),
        traced_out=_names(atom.aval for atom in equation.outvars),
        came=_names(value.array for value in operands),
        used=_names(arrays),
        gave=_names(results),
        shapes_in=tuple(map(shape_of, equation.invars)),
        shapes_out=tuple(map(shape_of, equation.outvars)),
        eqn=equation,
    )
    context.record(event)


def _names(things: Any) -> tuple[str, ...]:
    return tuple(dtype_name(dtype_of(thing)) for thing in things)


def _refuse_banned(equation: Equation, primitive: str, operands: Sequence[Value], settings: Settings) -> None:
    rule = settings.rule(primitive)
    if rule not in (CastPolicy.BANNED, CastPolicy.BANNED_LOWER_PRECISION):
        return
    came = [dtype_name(dtype_of(value.array)) for value in operands]
    low = [name for name in came if name in ("bfloat16", "float16") or name.startswith(("float8", "float4"))]
    if rule is CastPolicy.BANNED_LOWER_PRECISION and not low:
        return
    msg = (
        f"{primitive} is {rule} by the policy {settings.policy.name!r}, and {source_of(equation)} calls it with "
        f"{', '.join(came)}. Call it inside mezzo.jax.disabled(), or give it another rule: "
        f"policy.override({{{primitive!r}: 'fp32'}})."
    )
    raise BannedOpError(msg)


# Casts that the user wrote


@handles("convert_element_type")
def _convert(equation: Equation, operands: Sequence[Value], context: Context) -> list[Value]:
    """Honour a cast between float dtypes. One to the same dtype only made a weak type strong, so it is none."""
    (value,), old, new = operands, traced_dtypes(equation.invars)[0], traced_dtypes(equation.outvars)[0]
    primitive = "convert_element_type"
    if not (is_float(old) and is_float(new)) or context.settings.rule(primitive) is CastPolicy.OPAQUE:
        plan = opaque(equation, "") if is_float(old) and is_float(new) else Plan("no floats", "", [None])
        (result,) = run_plan(equation, primitive, operands, plan, context)
        numbers = frozenset({0.0, 1.0}) if old == jnp.bool_ and value.constants is None else value.constants
        return [Value(result.array, numbers if is_float(new) else None)]
    if old == new:
        # JAX writes the same for a weak number in a product as for a cast in the code.
        record(equation, primitive, "no cast", "", operands, [value.array], [value.array], context)
        return [value]
    result = cast(value.array, new)
    record(equation, primitive, "explicit cast", "", operands, [value.array], [result], context)
    return [Value(result, None if value.constants is None else rounded(value.constants, new))]
