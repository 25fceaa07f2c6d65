"""From a policy to what is done with each op: on a device, in a region of a dtype."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import tensorplay
from tensorplay import Tensor

from mezzo import tables
from mezzo.decision import LOW_DTYPES, CastPolicy
from mezzo.policy import Policy
from mezzo.tensorplay.actions import action_for
from mezzo.tensorplay.current import Action, Plan
from mezzo.tensorplay.mending import as_called, into_destination, made_again, widened_first
from mezzo.tensorplay.ops import FRAMEWORK
from mezzo.tensorplay.places import places
from mezzo.tensorplay.running_statistics import UPDATING, keeping_statistics
from mezzo.tensorplay.zero_beta import READING_GARBAGE, with_zeros
from mezzo.vocabulary import vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["DEVICES", "devices_here", "ops_of", "plan_for", "plan_on_devices"]

DEVICES = ("cpu", "cuda")
"""The device types for which TensorPlay has autocast."""


_BANS = (CastPolicy.BANNED, CastPolicy.BANNED_LOWER_PRECISION)
"""Rules that a repair must not get around."""


@lru_cache(maxsize=256)
def plan_for(policy: Policy, device: str, low: str) -> Plan:
    """Give what a policy does with each op.

    Args:
        policy: A policy for TensorPlay.
        device: A name from `DEVICES`; fills in the device's own table where the policy leaves it to that.
        low: The region's dtype, by name.

    Returns:
        Op name to action, for the ops of which some call is not made as it came.
    """
    here = policy.on(device)
    found = {op: _action(here, op, device, low) for op in _candidates(here)}
    return {op: action for op, action in found.items() if action is not None}


def _candidates(policy: Policy) -> Iterable[str]:
    """Give the ops that may need an action: those with a rule or repair, and all if there is a rule for unlisted ones."""
    if policy.default is not CastPolicy.FALLTHROUGH:
        return vocabulary(FRAMEWORK).traits
    return {*policy.ops, *((*tables.repairs(FRAMEWORK), *READING_GARBAGE) if policy.repairs else ())}


def _action(policy: Policy, op: str, device: str, low: str) -> Action | None:
    action = _of_dtypes(policy, op, device, low)
    if action is not None and op in UPDATING:
        return keeping_statistics(action)
    if op in READING_GARBAGE and policy.repairs and policy.rule_of(op, low) not in _BANS:
        return with_zeros(op, action or as_called)
    return action


def _of_dtypes(policy: Policy, op: str, device: str, low: str) -> Action | None:
    rule = CastPolicy(policy.rule_of(op, low))
    if not policy.repairs or op not in tables.repairs(FRAMEWORK) or rule in _BANS:
        return action_for(rule, op, device, low)
    lacks = tables.lacking(FRAMEWORK).get(op, frozenset())
    if rule is CastPolicy.LOWER_PRECISION_FP and low in lacks:
        rule = CastPolicy.FP32
    if "mutates" in vocabulary(FRAMEWORK).traits.get(op, ()):
        return into_destination(lacks)
    action = action_for(rule, op, device, low) or as_called
    mixed = op in tables.promoted_first(FRAMEWORK)
    if mixed or lacks:
        return widened_first(made_again(action), rule, low, lacks, mixed=mixed)
    return made_again(action)


@lru_cache(maxsize=64)
def ops_of(policy: Policy, devices: tuple[str, ...]) -> frozenset[str]:
    """Name the ops that are to be wrapped while a policy is in force, in a region of either dtype.

    Args:
        policy: A policy for TensorPlay.
        devices: Device types.

    Returns:
        Op names.
    """
    plans = [plan_for(policy, device, low) for device in devices for low in LOW_DTYPES]
    return frozenset(op for plan in plans for op in plan if places(op))


@lru_cache(maxsize=1)
def devices_here() -> tuple[str, ...]:
    """Name the device types that this process can have tensors on."""
    return DEVICES if tensorplay.cuda.is_available() else DEVICES[:1]


def plan_on_devices(plans: dict[str, Plan]) -> Plan | None:
    """Join the plans of the devices on which autocast is on.

    Args:
        plans: Device type to plan.

    Returns:
        One plan; a call of an op is made by the plan of the first device that one of its tensors is on. None without any.
    """
    if not plans:
        return None
    if len(plans) == 1:
        return next(iter(plans.values()))
    ops = {op for plan in plans.values() for op in plan}
    return {op: _by_device({device: plan.get(op) for device, plan in plans.items()}) for op in ops}


def _by_device(actions: dict[str, Action | None]) -> Action:
    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        action = actions.get(_device_of((*args, *kwargs.values())))
        return function(*args, **kwargs) if action is None else action(function, args, kwargs)

    return act


def _device_of(values: Iterable[Any]) -> str:
    """Give CUDA if a tensor is there, as the dispatcher of TensorPlay does; an empty string without a tensor."""
    found = ""
    for value in values:
        if isinstance(value, Tensor):
            found = str(value.device.type)
        elif isinstance(value, list | tuple):
            found = _device_of(value) or found
        if found == "cuda":
            break
    return found
