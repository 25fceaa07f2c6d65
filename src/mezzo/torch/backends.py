"""Accelerators that are plugged into PyTorch, and have their autocast kernels from mezzo: for each the table it follows.

For every other device PyTorch's own kernels apply a table, and mezzo changes what a policy says otherwise. Here there are
none: the table is a `Policy` that `mezzo.torch.register_accelerator` was given, and mezzo serves all of it, in plain
``torch.autocast`` regions too. This module only remembers; it registers nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from mezzo.decision import CastPolicy
from mezzo.policy import Policy
from mezzo.rules import ByDtype, RuleLike
from mezzo.torch.ops import expand_rules
from mezzo.vocabulary import vocabulary

__all__ = [
    "Backend",
    "backend_for",
    "NATIVE_DEFAULT",
    "as_table",
    "backends",
    "exact_names",
    "follow_default_dtype",
    "remember",
    "rules_of",
    "table",
]

NATIVE_DEFAULT = torch.float16
"""What every thread finds as the autocast dtype of such a device."""


@dataclass(frozen=True)
class Backend:
    """What has been registered for an accelerator.

    Attributes:
        name: Its device type.
        policy: The table.
        default_dtype: The dtype of regions that name none; None to leave PyTorch's.
    """

    name: str
    policy: Policy
    default_dtype: torch.dtype | None = None


class _Thread(threading.local):
    """The default dtypes that mezzo has set in a thread, by device type: PyTorch keeps them per thread."""

    def __init__(self) -> None:
        self.dtypes: dict[str, torch.dtype] = {}


_backends: dict[str, Backend] = {}
_thread = _Thread()


def backends() -> tuple[str, ...]:
    """Name the device types that have been registered."""
    return tuple(_backends)


def backend_for(device_type: str) -> Backend | None:
    """Give what has been registered for a device type; None for PyTorch's own and for a backend on its own."""
    return _backends.get(device_type)


def remember(name: str, policy: Policy, default_dtype: torch.dtype | None = None) -> None:
    """Put a table in the place of the one that a backend has, if any.

    Args:
        name: The device type.
        policy: The table; its `repairs` have no effect, regions say whether there are any.
        default_dtype: The dtype of regions that name none; None to leave it as it is.
    """
    known = _backends.get(name) or Backend(name, policy)
    _backends[name] = replace(known, policy=policy, default_dtype=default_dtype or known.default_dtype)
    follow_default_dtype(name)


def follow_default_dtype(device_type: str) -> None:
    """Set a backend's default dtype in this thread, unless somebody has set another one here.

    Args:
        device_type: Any device type; nothing happens for one without a default of its own.
    """
    backend = _backends.get(device_type)
    if backend is None or backend.default_dtype is None:
        return
    wanted, known = backend.default_dtype, _thread.dtypes.get(device_type)
    if known is not wanted:
        if torch.get_autocast_dtype(device_type) is (known or NATIVE_DEFAULT):
            torch.set_autocast_dtype(device_type, wanted)
        _thread.dtypes[device_type] = wanted


def rules_of(device_type: str, low: str) -> Mapping[str, CastPolicy] | None:
    """Give the table of a backend.

    Args:
        device_type: A device type.
        low: The region's dtype, ``"bfloat16"`` or ``"float16"``; another is treated as the former.

    Returns:
        Canonical op name to cast policy; None if nothing has been registered for the device.
    """
    backend = _backends.get(device_type)
    return None if backend is None else table(backend.policy, low)


@lru_cache(maxsize=64)
def table(policy: Policy, low: str) -> Mapping[str, CastPolicy]:
    """Write a policy out as a table: every op that it has a rule for, those of its default included.

    Raises:
        UnknownOpError: It names a custom op that is not registered in this process.
    """
    rules: dict[str, CastPolicy] = {}
    if policy.default != CastPolicy.FALLTHROUGH:
        traits = vocabulary("torch").traits
        rules = {op: CastPolicy(policy.default) for op in traits if "compute" in traits[op]}
    for op, rule in expand_rules(policy.ops).items():
        rules[op] = getattr(rule, low) if isinstance(rule, ByDtype) else rule
    return rules


def exact_names(rules: Mapping[str, RuleLike]) -> dict[str, RuleLike]:
    """Write canonical names so that each stands for itself: without an overload, a name would cover them all."""
    return {op if "." in op else f"{op}.default": rule for op, rule in rules.items()}


def as_table(policy: Policy, *, without: frozenset[str] = frozenset()) -> Policy:
    """Give a policy that can be a device's own table: one without repairs.

    Args:
        policy: Any policy that stands by itself.
        without: Ops to leave out. If the policy's default would bring them back, the default is written out.

    Returns:
        The policy.
    """
    rules: dict[str, RuleLike] = dict(policy.ops)
    default: str = policy.default
    if without and default != CastPolicy.FALLTHROUGH:
        low, half = table(policy, "bfloat16"), table(policy, "float16")
        rules = {op: {"bfloat16": low[op], "float16": half[op]} for op in low}
        default = CastPolicy.FALLTHROUGH
    kept = exact_names({op: rule for op, rule in rules.items() if op not in without})
    return Policy(policy.name, kept, default=default, repairs=False, parent=policy.parent)
