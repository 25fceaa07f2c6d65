"""Rules: what a policy holds for an op, and which rule an op can take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import tables
from .decision import LOW_DTYPES, CastPolicy, parse_cast_policy
from .errors import PolicyError, near
from .vocabulary import vocabulary

__all__ = ["ByDtype", "Rule", "RuleLike", "device_rules", "misfit", "parse_rule", "resolve_rules"]


@dataclass(frozen=True)
class ByDtype:
    """A rule that differs between the two lower-precision dtypes.

    Attributes:
        bfloat16: The cast policy in a bfloat16 region.
        float16: The cast policy in a float16 region.

    Example:
        >>> from mezzo import Policy
        >>> Policy("mine").override({"softmax": {"bfloat16": "fallthrough", "float16": "fp32"}}).rule("softmax", "float16")
        <CastPolicy.FP32: 'fp32'>
    """

    bfloat16: CastPolicy
    float16: CastPolicy

    def __post_init__(self) -> None:
        """Let names stand for cast policies."""
        for dtype in LOW_DTYPES:
            object.__setattr__(self, dtype, parse_cast_policy(getattr(self, dtype)))

    def __str__(self) -> str:
        return f"{self.bfloat16} in bfloat16, {self.float16} in float16"


Rule = CastPolicy | ByDtype
"""What a policy holds for an op."""

RuleLike = str | CastPolicy | ByDtype | Mapping[str, str]
"""What a caller may write for a rule."""


def device_rules(device: str, framework: str) -> dict[str, Rule]:
    """Give a device's built-in table as rules.

    Args:
        device: A name from `mezzo.tables.devices`.
        framework: Whose table.

    Returns:
        Canonical op name to rule.

    Raises:
        DeviceError: There is no table for the device.
    """
    rules: dict[str, Rule] = dict(tables.device_table(device, framework))
    for op, other in tables.differing(device, framework).items():
        rules[op] = ByDtype(CastPolicy(str(rules[op])), other)
    return rules


def resolve_rules(ops: Mapping[str, RuleLike], framework: str) -> dict[str, Rule]:
    """Turn what a caller wrote into rules by canonical op name.

    Args:
        ops: Op names, as `mezzo.vocabulary.Vocabulary.resolve` understands them, to rules.
        framework: Whose ops.

    Returns:
        Canonical op name to rule. Overloads that a rule cannot be applied to are left out if others can take it.

    Raises:
        UnknownOpError: A name is no op.
        PolicyError: A rule is none, or fits no overload that the name covers.
    """
    words = vocabulary(framework)
    rules: dict[str, Rule] = {}
    for name, given in ops.items():
        if not isinstance(name, str):
            msg = f"op names are strings, got {name!r}."
            raise PolicyError(msg)
        rule = parse_rule(name, given)
        covered = words.resolve(name)
        faults = {op: misfit(rule, words.traits.get(op), op, framework) for op in covered}
        fitting = [op for op, fault in faults.items() if not fault]
        if not fitting:
            raise PolicyError(faults[covered[0]])
        rules.update(dict.fromkeys(fitting, rule))
    if framework == "tensorplay":
        # There a name may cover the op of another name, which has a rule of its own where it is given one.
        rules.update({name: parse_rule(name, rule) for name, rule in ops.items() if name in rules})
    return rules


def parse_rule(name: str, given: RuleLike) -> Rule:
    """Turn one written rule into a `Rule`.

    Args:
        name: The op's name, for the message.
        given: A cast policy, its name, or a mapping with one for each lower-precision dtype.

    Returns:
        The rule; a pair of equal cast policies becomes that cast policy.

    Raises:
        PolicyError: It is not a rule.
    """
    if isinstance(given, ByDtype):
        return given
    try:
        if not isinstance(given, Mapping):
            return parse_cast_policy(given)
        if unknown := sorted(set(map(str, given)) - set(LOW_DTYPES)):
            hint = near(unknown[0], LOW_DTYPES)
            msg = f"{unknown[0]!r} is not a lower-precision dtype; allowed are {', '.join(LOW_DTYPES)}.{hint}"
            raise PolicyError(msg)
        if missing := [dtype for dtype in LOW_DTYPES if dtype not in given]:
            msg = f"a rule that differs by dtype must give both; {missing[0]!r} is missing."
            raise PolicyError(msg)
        pair = ByDtype(*(parse_cast_policy(given[dtype]) for dtype in LOW_DTYPES))
    except PolicyError as error:
        msg = f"rule for {name!r}: {error}"
        raise PolicyError(msg) from None
    return pair.bfloat16 if pair.bfloat16 is pair.float16 else pair


_NOT_CAST = (CastPolicy.BANNED, CastPolicy.BANNED_LOWER_PRECISION, CastPolicy.FALLTHROUGH)
_NOT_CAST_NAMES = "banned, banned_lower_precision and fallthrough"
_APPENDABLE = frozenset({"aten::norm.Scalar", "aten::norm.ScalarOpt_dim"})


def misfit(rule: Rule, traits: frozenset[str] | None, op: str, framework: str = "torch") -> str:
    """Say why a rule cannot be applied to an op; an empty string if it can."""
    if isinstance(rule, ByDtype):
        return misfit(rule.bfloat16, traits, op, framework) or misfit(rule.float16, traits, op, framework)
    if framework == "jax":
        return _misfit_jax(rule, traits or frozenset(), op)
    if framework == "tensorplay":
        return _misfit_tensorplay(rule, traits or frozenset(), op)
    if rule is CastPolicy.OPAQUE:
        return f"{op}: opaque is a rule for JAX; use fallthrough." if "::" in op else ""
    if traits is None:
        return ""
    if traits & {"out", "mutates"} and rule not in _NOT_CAST:
        return f"{op} writes into an argument, so its inputs cannot be cast; allowed are {_NOT_CAST_NAMES}."
    if rule is CastPolicy.FP32_SET_OPT_DTYPE and "dtype" not in traits:
        return f"{op} has no optional dtype argument for fp32_set_opt_dtype to set; use fp32."
    if rule is CastPolicy.FP32_APPEND_DTYPE and op not in _APPENDABLE:
        return f"{op} has no overload with a dtype for fp32_append_dtype to call; use fp32."
    return ""


def _misfit_tensorplay(rule: CastPolicy, traits: frozenset[str], op: str) -> str:
    if rule is CastPolicy.OPAQUE:
        return f"{op}: opaque is a rule for JAX; use fallthrough."
    if rule in (CastPolicy.FP32_SET_OPT_DTYPE, CastPolicy.FP32_APPEND_DTYPE):
        return f"{op}: {rule} is a rule for PyTorch, and for TensorPlay the inputs are cast instead; use fp32."
    if "mutates" in traits and rule not in _NOT_CAST:
        return f"{op} writes into an argument, so its inputs cannot be cast; allowed are {_NOT_CAST_NAMES}."
    return ""


_ENTERED = (CastPolicy.FALLTHROUGH, CastPolicy.OPAQUE, CastPolicy.BANNED)
_ENTERED_NAMES = ", ".join(_ENTERED)


def _misfit_jax(rule: CastPolicy, traits: frozenset[str], op: str) -> str:
    if rule in (CastPolicy.FP32_SET_OPT_DTYPE, CastPolicy.FP32_APPEND_DTYPE):
        return f"{op}: {rule} is a rule for PyTorch, whose ops have dtype arguments; use fp32."
    if "fixed" in traits and rule not in (CastPolicy.OPAQUE, CastPolicy.BANNED):
        return (
            f"{op} holds the dtypes with which it was traced, so they cannot be changed; allowed are opaque and banned."
        )
    if "enters" not in traits or rule in _ENTERED:
        return ""
    if op == "convert_element_type":
        return f"{op} is a cast that the function itself asks for; allowed are {_ENTERED_NAMES}."
    return f"{op} runs other primitives, and the rules of these decide; allowed are {_ENTERED_NAMES}."
