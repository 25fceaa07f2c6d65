"""Why an op runs in the dtype it does: data for programs, text for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import tables
from .decision import LOW_DTYPES, CastPolicy, input_dtypes
from .primitive_effects import primitive_effects
from .rules import ByDtype, Rule
from .tensorplay_effects import tensorplay_repair
from .vocabulary import vocabulary

if TYPE_CHECKING:
    from .policy import Policy

__all__ = ["Explanation", "OpExplanation", "explain"]

_INPUTS = ("float32", "bfloat16", "float16", "float64", "int64")

_MEANING = {
    CastPolicy.LOWER_PRECISION_FP: "every eligible input is cast to the region's dtype",
    CastPolicy.FP32: "every eligible input is cast to float32",
    CastPolicy.FP32_SET_OPT_DTYPE: (
        "no input is cast; the op is asked for a float32 result, unless the caller gave a dtype"
    ),
    CastPolicy.FP32_APPEND_DTYPE: "no input is cast; the overload that takes a dtype is called with float32",
    CastPolicy.PROMOTE: "every eligible input is cast to the widest dtype among them",
    CastPolicy.BANNED: "the call raises",
    CastPolicy.BANNED_LOWER_PRECISION: "the call raises if an input is in lower precision, else it runs as it came",
    CastPolicy.FALLTHROUGH: "the op, and the ops inside it, run in the dtypes that came in",
    CastPolicy.OPAQUE: "the op runs in exactly the dtypes that were traced",
}
_OWNERS = {"torch": "PyTorch"}
_HEADINGS: dict[object, str] = {
    None: "not listed",
    "own": "a kernel of the framework's own",
    "device": "left to the device",
}
_ALONE: dict[object, str] = {
    None: "runs in the dtypes that come in",
    "own": "casts to float16, whatever the region's dtype, and re-flattens the weights into one buffer",
    "device": "the device's own table decides; name a device to see it",
}


@dataclass(frozen=True)
class OpExplanation:
    """What happens to one overload.

    Attributes:
        op: Canonical name.
        rule: The rule in force; None if the op is not listed and the default is to leave it alone, ``"device"`` if the
            device's own table decides, ``"own"`` for a kernel of the framework's that no cast policy describes.
        origin: Where the rule was set.
        inputs: For each lower-precision dtype of a region: input dtype to the dtype that reaches the op. Empty for an
            ``opaque`` rule of JAX's: whatever comes in, the op gets the dtypes that were traced.
        served_by: Whose kernel casts, for TensorPlay always ``"mezzo"``; empty if no device was named, and for JAX.
        repair: What is done if a call fails over dtypes; empty if nothing is.
        framework: Whose op it is.
    """

    op: str
    rule: Rule | str | None
    origin: str
    inputs: dict[str, dict[str, str]]
    served_by: str = ""
    repair: str = ""
    framework: str = "torch"

    def lines(self) -> list[str]:
        """Say it in a few lines of text."""
        text = [f"{self.op}: {_HEADINGS.get(self.rule, str(self.rule))}", f"  from {self.origin}", *self._effects()]
        if self.repair:
            again = "" if self.framework == "tensorplay" else "a call that fails over dtypes is made again "
            text.append(f"  {again}{self.repair}")
        # An op of TensorPlay's that is not listed is not cast by anybody.
        unserved = not self.served_by or (self.rule is None and self.framework == "tensorplay")
        return text if unserved else [*text, f"  cast by {self.served_by}"]

    def _effects(self) -> list[str]:
        if self.framework == "jax" and isinstance(self.rule, CastPolicy | ByDtype):
            traits = vocabulary("jax").traits.get(self.op, frozenset())
            return [f"  {effect}" for effect in primitive_effects(self.op, self.rule, traits)]
        if self.rule in _ALONE:
            return [f"  {_ALONE[self.rule]}"]
        said = {low: _effect(_rule_for(self.rule, low), self.inputs[low]) for low in LOW_DTYPES}
        if len(set(said.values())) == 1:
            return [f"  {said['bfloat16']}"]
        return [f"  in a {low} region {effect}" for low, effect in said.items()]


def _effect(rule: CastPolicy, inputs: dict[str, str]) -> str:
    if rule in (CastPolicy.BANNED, CastPolicy.BANNED_LOWER_PRECISION):
        return _MEANING[rule]
    changed = [f"{came} -> {reached}" for came, reached in inputs.items() if came != reached]
    kept = [came for came, reached in inputs.items() if came == reached]
    effect = "; ".join(part for part in (", ".join(changed), f"{', '.join(kept)} as they come") if part)
    return f"{_MEANING[rule]} ({effect})"


@dataclass(frozen=True)
class Explanation:
    """What a policy does to every op that a name stands for.

    Attributes:
        name: The name that was asked for.
        policy: The policy's name.
        device: The device that was asked about, None for none.
        ops: One entry per overload; none for a function of JAX's or TensorPlay's that is composed of several ops.
        inside: Entries for the ops that the call reaches through others, if those asked for are not listed. For TensorPlay,
            those of which the function of this name is composed in Python, whether they are listed or not.
    """

    name: str
    policy: str
    ops: tuple[OpExplanation, ...]
    inside: tuple[OpExplanation, ...] = ()
    device: str | None = None

    def __str__(self) -> str:
        text = [f"{self.name} under {self.policy!r}" + (f" on {self.device}" if self.device else "")]
        for op in self.ops:
            text += op.lines()
        if self.inside:
            text.append(self._about_inside())
            for op in self.inside:
                text += op.lines()
        return "\n".join(text)

    def _about_inside(self) -> str:
        if self.inside[0].framework == "tensorplay":
            return "the function of this name is composed of" if self.ops else "no op of its own; it is composed of"
        return "and inside it" if self.ops else "no primitive of its own; it is traced as"


def explain(policy: Policy, name: str, device: str | None = None) -> Explanation:
    """Explain an op; the work behind `mezzo.Policy.explain`.

    Args:
        policy: The policy.
        name: An op name, in any spelling that the vocabulary knows.
        device: The device whose own table fills in what the policy leaves to it.

    Returns:
        The explanation.

    Raises:
        UnknownOpError: The name is no op.
    """
    words = vocabulary(policy.framework)
    policy = policy.on(device) if device else policy
    if policy.framework == "jax" and (composed := words.inside(name)):
        return Explanation(name, policy.name, (), tuple(_explain_primitive(policy, op) for op in composed), device)
    if policy.framework == "tensorplay" and (entered := words.inside(name)):
        own = tuple(_explain_one(policy, op, device) for op in words.own(name))
        return Explanation(name, policy.name, own, tuple(_explain_one(policy, op, device) for op in entered), device)
    ops = tuple(_explain_one(policy, op, device) for op in words.resolve(name))
    inside: tuple[OpExplanation, ...] = ()
    if all(op.rule is None for op in ops):
        inside = tuple(
            entry for op in words.inside(name) if (entry := _explain_one(policy, op, device)).rule is not None
        )
    return Explanation(name, policy.name, ops, inside, device)


def _explain_primitive(policy: Policy, op: str) -> OpExplanation:
    rule = policy.ops.get(op) or CastPolicy(policy.rule_of(op, "bfloat16"))
    inputs: dict[str, dict[str, str]] = {low: {} for low in LOW_DTYPES}
    for low in LOW_DTYPES:
        kind = _rule_for(rule, low)
        if kind is not CastPolicy.OPAQUE:
            inputs[low] = {dtype: input_dtypes(kind, [dtype], low)[0] for dtype in _INPUTS}
    return OpExplanation(op, rule, policy.origin(op), inputs, framework="jax")


def _explain_one(policy: Policy, op: str, device: str | None) -> OpExplanation:
    if policy.framework == "jax":
        return _explain_primitive(policy, op)
    rule: Rule | str | None = policy.ops.get(op)
    own = device is not None and op in tables.own_kernels(device, policy.framework)
    if rule is None and own:
        owner = _OWNERS.get(policy.framework, policy.framework)
        return OpExplanation(op, "own", owner, {}, f"{owner}'s kernel")
    if rule is None:
        unlisted = policy.rule_of(op, "bfloat16")
        rule = None if unlisted == CastPolicy.FALLTHROUGH else unlisted
    inputs = {}
    if rule is not None and rule != "device":
        for low in LOW_DTYPES:
            kind = _rule_for(rule, low)
            inputs[low] = {dtype: input_dtypes(kind, [dtype], low)[0] for dtype in _INPUTS}
    served, repair = _served_by(policy, op, rule, device), _repair(policy, op, rule)
    return OpExplanation(op, rule, policy.origin(op), inputs, served, repair, policy.framework)


def _repair(policy: Policy, op: str, rule: Rule | str | None) -> str:
    if not policy.repairs or rule == CastPolicy.BANNED or op not in tables.repairs(policy.framework):
        return ""
    if policy.framework == "tensorplay":
        return tensorplay_repair(op)
    if vocabulary(policy.framework).traits.get(op, frozenset()) & {"out", "mutates"}:
        return "with its inputs in the dtype of what it writes to, else in float32"
    return "with its inputs in the widest of their dtypes, float64 included, else in float32"


def _served_by(policy: Policy, op: str, rule: Rule | str | None, device: str | None) -> str:
    if device is None:
        return ""
    if policy.framework == "tensorplay":
        return "mezzo"
    own = tables.device_table(device, policy.framework).get(op)
    if rule is None and own is None:
        return "nobody; the ops inside it that are listed, if there are any, are cast"
    if rule == own:
        return f"{_OWNERS.get(policy.framework, policy.framework)}'s kernel"
    if op in tables.own_kernels(device, policy.framework):
        return "mezzo's kernel, in the place of the device's own"
    return f"mezzo's kernel, since the device's own rule is {own or 'none'}"


def _rule_for(rule: Rule | str | None, low: str) -> CastPolicy:
    return getattr(rule, low) if isinstance(rule, ByDtype) else CastPolicy(str(rule))
