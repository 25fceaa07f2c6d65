"""Plans: what a policy changes on a device, compared with what PyTorch does there by itself.

A plan lists only the ops whose rule differs from the device's own. An op that is not in the plan is PyTorch's business, at
PyTorch's speed. `serve_all` plans list every op of the device's table, so that mezzo's actions can be held against
PyTorch's kernels one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from mezzo import tables
from mezzo.decision import CastPolicy
from mezzo.errors import DeviceError
from mezzo.policy import Policy
from mezzo.rules import ByDtype, Rule
from mezzo.torch.actions import Action, action_for
from mezzo.torch.casting import Device, device_for
from mezzo.torch.ops import OpSpec, expand_custom_op, op_spec
from mezzo.vocabulary import vocabulary

__all__ = ["Plan", "Served", "build_plan", "native_rules"]


@dataclass(frozen=True, slots=True)
class Served:
    """One op that mezzo serves.

    Attributes:
        op: Canonical name.
        rule: The cast policy, None for an op that the policy leaves alone though the device lists it.
        action: What the kernel runs; None to run the op past autocast, with autocast on for the ops inside it.
    """

    op: str
    rule: CastPolicy | None
    action: Action | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The ops that mezzo serves under one policy on one device.

    Attributes:
        policy: The policy.
        device: The device type.
        bfloat16: Canonical name to what is served in a bfloat16 region, and in one of any other dtype than float16.
        float16: The same for a float16 region; the same object as ``bfloat16`` where no rule differs.
    """

    policy: Policy
    device: str
    bfloat16: Mapping[str, Served]
    float16: Mapping[str, Served]

    @property
    def ops(self) -> frozenset[str]:
        """The ops that need a kernel of mezzo's."""
        return frozenset(self.bfloat16) | frozenset(self.float16)

    def wrapped(self, wrap: Callable[[Served], Served]) -> Plan:
        """Give the same plan with every entry changed by a function; how an observer looks in."""
        bfloat16 = {op: wrap(served) for op, served in self.bfloat16.items()}
        float16 = {op: wrap(served) for op, served in self.float16.items()}
        return replace(self, bfloat16=bfloat16, float16=float16)


def native_rules(device: str) -> Mapping[str, CastPolicy]:
    """Give the rules that PyTorch's own kernels follow on a device.

    Args:
        device: A device type.

    Returns:
        Canonical name to cast policy; empty for a backend whose kernels mezzo has no table of, so that every op of a policy
        is served by mezzo there.
    """
    try:
        return tables.device_table(device)
    except DeviceError:
        return {}


@lru_cache(maxsize=256)
def _cached_plan(policy: Policy, name: str, device_type: str, serve_all: bool) -> Plan:  # noqa: ARG001 - equal policies differ in name
    device = device_for(device_type)
    native = native_rules(device_type)
    rules = _expanded(policy)
    per_dtype: list[dict[str, Served]] = []
    for low in ("bfloat16", "float16"):
        served: dict[str, Served] = {}
        for op in _candidates(policy, rules, native):
            own = native.get(op)
            wanted = _wanted(policy, rules, op, low, own)
            if wanted == own and not (serve_all and own is not None):
                continue
            if (spec := op_spec(op)) is not None:
                served[op] = Served(op, wanted, _action(wanted, spec, device, policy.name))
        per_dtype.append(served)
    same = {op: s.rule for op, s in per_dtype[0].items()} == {op: s.rule for op, s in per_dtype[1].items()}
    return Plan(policy, device_type, per_dtype[0], per_dtype[0] if same else per_dtype[1])


def build_plan(policy: Policy, device_type: str, *, serve_all: bool = False) -> Plan:
    """Work out what mezzo serves under a policy on a device.

    Args:
        policy: The policy.
        device_type: A device type with an autocast dispatch key.
        serve_all: Serve the ops on which the policy and PyTorch agree too.

    Returns:
        The plan; the same object for equal arguments.

    Raises:
        UnknownOpError: The policy names a custom op that is not registered.
        PolicyError: A rule does not fit an op's schema.
    """
    return _cached_plan(policy, policy.name, device_type, serve_all)


def _expanded(policy: Policy) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for op, rule in policy.ops.items():
        names = (op,) if op.startswith("aten::") else expand_custom_op(op)
        rules.update(dict.fromkeys(names, rule))
    return rules


def _candidates(policy: Policy, rules: Mapping[str, Rule], native: Mapping[str, CastPolicy]) -> list[str]:
    names = set(rules) | set(native)
    if policy.default not in ("device", CastPolicy.FALLTHROUGH):
        words = vocabulary("torch")
        names |= {op for op, traits in words.traits.items() if "compute" in traits}
    return sorted(names)


def _wanted(
    policy: Policy,
    rules: Mapping[str, Rule],
    op: str,
    low: str,
    own: CastPolicy | None,
) -> CastPolicy | None:
    rule = rules.get(op)
    if rule is None:
        default = policy.rule_of(op, low)
        if default == "device":
            return own
        return None if default is CastPolicy.FALLTHROUGH else CastPolicy(default)
    if isinstance(rule, ByDtype):
        return rule.float16 if low == "float16" else rule.bfloat16
    return rule


def _action(rule: CastPolicy | None, spec: OpSpec, device: Device, policy_name: str) -> Action | None:
    return None if rule is None else action_for(rule, spec, device, policy_name)
