"""What a rule does to a primitive of JAX, in words."""

from __future__ import annotations

from .decision import LOW_DTYPES, CastPolicy
from .rules import ByDtype, Rule

__all__ = ["primitive_effects"]

_MEANING = {
    CastPolicy.LOWER_PRECISION_FP: "every float operand is cast to the region's dtype",
    CastPolicy.FP32: "every float operand is cast to float32",
    CastPolicy.PROMOTE: (
        "every float operand is cast to the widest dtype among them; a literal, or a bias or scale that is broadcast, "
        "adapts to the others"
    ),
    CastPolicy.BANNED: "autocast raises",
    CastPolicy.BANNED_LOWER_PRECISION: "autocast raises if an operand is in lower precision",
    CastPolicy.FALLTHROUGH: "it runs in the dtype that comes in",
    CastPolicy.OPAQUE: "it runs in exactly the dtypes that were traced",
}

_BY_NAME = {
    ("convert_element_type", CastPolicy.FALLTHROUGH): "the cast that the function itself asks for is made",
    ("while", CastPolicy.OPAQUE): (
        "it runs in exactly the dtypes that were traced, unless autocast(while_='body') asks for its body to follow this "
        "policy"
    ),
    ("custom_vjp_call", CastPolicy.OPAQUE): (
        "it runs in exactly the dtypes that were traced, unless autocast(custom_vjp='enter') asks for its functions to "
        "follow this policy"
    ),
}

_BY_TRAIT = {
    ("dot", CastPolicy.LOWER_PRECISION_FP): (
        "every float operand is cast to the region's dtype, and the result has it; a call with a precision of its own is "
        "left alone"
    ),
    ("enters", CastPolicy.FALLTHROUGH): "the primitives inside it follow this policy",
    ("follows", CastPolicy.FALLTHROUGH): "the other float operands are cast to the dtype of the first",
}


def primitive_effects(op: str, rule: Rule, traits: frozenset[str]) -> list[str]:
    """Say what a rule does to a primitive.

    Args:
        op: The primitive.
        rule: Its rule.
        traits: Its traits.

    Returns:
        One sentence, or one per lower-precision dtype where they differ.

    Example:
        >>> primitive_effects("exp", CastPolicy.FP32, frozenset({"compute"}))
        ['every float operand is cast to float32']
    """
    if isinstance(rule, ByDtype):
        return [f"in a {low} region {_effect(op, getattr(rule, low), traits)}" for low in LOW_DTYPES]
    return [_effect(op, rule, traits)]


def _effect(op: str, rule: CastPolicy, traits: frozenset[str]) -> str:
    if (op, rule) in _BY_NAME:
        return _BY_NAME[op, rule]
    return next((_BY_TRAIT[trait, rule] for trait in traits if (trait, rule) in _BY_TRAIT), _MEANING[rule])
