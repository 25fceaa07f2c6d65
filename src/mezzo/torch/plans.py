"""Plans: what a policy changes on a device, compared with what PyTorch does there by itself.

mezzo serves only the ops whose rule differs from the device's own. Under a policy with repairs the others that can need one
are watched while PyTorch serves them. Any other op is PyTorch's business, at PyTorch's speed. On an accelerator that has its
autocast kernels from mezzo (`mezzo.torch.backends`) there is nobody else to serve the device's table, so all of it is.

A plan may also serve every op of the device's table, so that mezzo's actions can be held against
PyTorch's kernels one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import torch

from mezzo import tables
from mezzo.decision import CastPolicy
from mezzo.errors import DeviceError
from mezzo.policy import Policy
from mezzo.rules import ByDtype, Rule
from mezzo.torch.actions import Action, action_for, call_of
from mezzo.torch.backends import backend_for, rules_of, table
from mezzo.torch.casting import Device, device_for
from mezzo.torch.ops import OpSpec, expand_rules, op_spec
from mezzo.torch.repairs import Repair
from mezzo.vocabulary import vocabulary

__all__ = ["FUSED_LAYER", "Plan", "Serve", "Served", "build_plan", "device_rules", "native_rules"]


@dataclass(frozen=True, slots=True)
class Served:
    """One op that mezzo serves.

    Attributes:
        op: Canonical name.
        rule: The cast policy, None for an op that the policy leaves alone though the device lists it.
        action: What the kernel runs; None to run the op past autocast, with autocast on for the ops inside it.
        repair: What is done if that fails over dtypes; None to let it fail.
    """

    op: str
    rule: CastPolicy | None
    action: Action | None
    repair: Repair | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The ops that mezzo serves under one policy on one device.

    Attributes:
        policy: The policy.
        device: The device type.
        bfloat16: Canonical name to what is served in a bfloat16 region, and in one of any other dtype than float16.
        float16: The same for a float16 region; the same object as ``bfloat16`` where no rule differs.
        watched: Ops that PyTorch serves under mezzo's eyes (`mezzo.torch.watching`).
    """

    policy: Policy
    device: str
    bfloat16: Mapping[str, Served] = field(repr=False)
    float16: Mapping[str, Served] = field(repr=False)
    watched: frozenset[str] = field(default=frozenset(), repr=False)

    def __bool__(self) -> bool:
        return bool(self.bfloat16 or self.float16 or self.watched)

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
    if device == torch._C._get_privateuse1_backend_name():  # it may have been given the name of a table
        return {}
    try:
        return tables.device_table(device)
    except DeviceError:
        return {}


def device_rules(device: str, low: str) -> Mapping[str, CastPolicy]:
    """Give the device's own table, whoever applies it.

    Args:
        device: A device type.
        low: The region's dtype, ``"bfloat16"`` or ``"float16"``.

    Returns:
        Canonical name to cast policy.
    """
    registered = rules_of(device, low)
    return native_rules(device) if registered is None else registered


Serve = Literal["changed", "repaired", "all"]
"""Which ops mezzo serves; see `build_plan`."""

FUSED_LAYER = "aten::_transformer_encoder_layer_fwd"
"""The inference of a whole `torch.nn.TransformerEncoderLayer`, which is watched if the ops inside are."""

_FUSED_ATTENTION = "aten::_native_multi_head_attention"
"""Attention in inference. PyTorch does not look at the dtypes of what is inside: with weights cast and a bias not, it takes
the bits of the one for the other. So a policy that leaves it alone has all of it in the dtypes that come in."""

_IN_FUSED_LAYER = frozenset((_FUSED_ATTENTION, "aten::addmm", "aten::_addmm_activation"))


@lru_cache(maxsize=256)
def _cached_plan(policy: Policy, name: str, device_type: str, serve: Serve, home: Policy | None) -> Plan:  # noqa: ARG001 - equal policies differ in name
    rules = expand_rules(policy.ops)
    repairable = tables.repairs() if policy.repairs else frozenset()
    watched: set[str] = set()
    per_dtype: list[dict[str, Served]] = []
    for low in ("bfloat16", "float16"):
        served: dict[str, Served] = {}
        listed = native_rules(device_type) if home is None else table(home, low)
        whole = _run_whole(policy, rules, low, listed)
        for op in sorted(_candidates(policy, rules, listed) | repairable | whole):
            own = listed.get(op)
            wanted = _wanted(policy, rules, op, low, own)
            if wanted is None and op in whole:
                wanted = CastPolicy.FALLTHROUGH
            # Nobody watches the ops inside of one that mezzo itself serves by the device's table.
            native = own if home is None else None
            repaired = policy.repairs and _may_fail(wanted, native, op in repairable)
            is_listed = own is not None and (home is not None or serve == "all")
            if wanted != own or (serve != "changed" and repaired) or is_listed:
                source = policy if home is None or op in rules else home
                served.update(_served(op, wanted, source.name, device_type, repaired=repaired))
            elif repaired:
                watched.add(op)
        per_dtype.append(served)
    if watched.issuperset(_IN_FUSED_LAYER):
        watched.add(FUSED_LAYER)
    same = {op: s.rule for op, s in per_dtype[0].items()} == {op: s.rule for op, s in per_dtype[1].items()}
    left = frozenset(watched) if serve == "changed" else frozenset()
    return Plan(policy, device_type, per_dtype[0], per_dtype[0] if same else per_dtype[1], left)


def _run_whole(policy: Policy, rules: Mapping[str, Rule], low: str, listed: Mapping[str, CastPolicy]) -> frozenset[str]:
    """Name the fused ops whose insides are not to be cast one by one: if the policy leaves attention alone, both."""
    own = listed.get(_FUSED_ATTENTION)
    if own is None or _wanted(policy, rules, _FUSED_ATTENTION, low, own) is not None:
        return frozenset()
    return frozenset((_FUSED_ATTENTION, FUSED_LAYER))


def _may_fail(wanted: CastPolicy | None, own: CastPolicy | None, repairable: bool) -> bool:
    """Say whether a call of an op can need a repair, or the kept casts of its weights a look."""
    if wanted in (CastPolicy.BANNED, CastPolicy.BANNED_LOWER_PRECISION):
        return False
    # Under a rule that is not the device's own, the ops inside are not watched, so a composite op has to be.
    return repairable or wanted is CastPolicy.LOWER_PRECISION_FP or wanted is not own


def _served(
    op: str, wanted: CastPolicy | None, policy_name: str, device_type: str, *, repaired: bool
) -> dict[str, Served]:
    spec, device = op_spec(op), device_for(device_type)
    if spec is None:  # a table may be of another release
        return {}
    repair = Repair(spec, device, call_of(spec)) if repaired else None
    return {op: Served(op, wanted, _action(wanted, spec, device, policy_name), repair)}


def build_plan(policy: Policy, device_type: str, *, serve: Serve = "changed") -> Plan:
    """Work out what mezzo serves under a policy on a device.

    Args:
        policy: The policy.
        device_type: A device type with an autocast dispatch key.
        serve: ``"changed"``: the ops on which the policy and PyTorch disagree; those that can need a repair are watched.
            ``"repaired"``: those too, for plain regions, in which nothing can be watched. ``"all"``: every op that the
            device lists as well.

    Returns:
        The plan; the same object for equal arguments.

    Raises:
        UnknownOpError: The policy names a custom op that is not registered.
        PolicyError: A rule does not fit an op's schema.
    """
    backend = backend_for(device_type)
    return _cached_plan(policy, policy.name, device_type, serve, None if backend is None else backend.policy)


def _candidates(policy: Policy, rules: Mapping[str, Rule], native: Mapping[str, CastPolicy]) -> set[str]:
    names = set(rules) | set(native)
    if policy.default not in ("device", CastPolicy.FALLTHROUGH):
        words = vocabulary("torch")
        names |= {op for op, traits in words.traits.items() if "compute" in traits}
    return names


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
