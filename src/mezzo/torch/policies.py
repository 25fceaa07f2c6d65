"""Which policy is in force: the process-wide default, and what a region puts in its place."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

import torch

from mezzo.builtin import PolicyLike, builtin_policy, resolve_policy
from mezzo.errors import UnknownOpError
from mezzo.policy import Policy
from mezzo.torch.active import NOTHING, Active, Slot, renew, slot_for
from mezzo.torch.backends import backend_for, backends
from mezzo.torch.kernels import install
from mezzo.torch.ops import check_device
from mezzo.torch.plans import Plan, Serve, build_plan
from mezzo.torch.tokens import compiler, content_of

__all__ = [
    "active_for",
    "active_policy",
    "follow_default",
    "follow_table",
    "get_default_policy",
    "policy_on",
    "prepare_plan",
    "region_default",
    "set_default_policy",
]

_default: Policy | None = None
_lock = threading.RLock()
_by_name: dict[tuple[str, str], Active] = {}
_of_backends: dict[str, Active] = {}
"""What rules the plain regions of accelerators that have their kernels from mezzo: their own tables."""
_on_backends: weakref.WeakKeyDictionary[Active, tuple[str, Serve]] = weakref.WeakKeyDictionary()
"""All that is in force on such accelerators, and how it is served: it changes when their tables do."""


def set_default_policy(policy: PolicyLike | None) -> None:
    """Set the policy of every region that names none, plain ``torch.autocast`` regions included.

    So a trainer that calls PyTorch's own API can be steered without touching it. The setting is for the process, takes
    effect at once in all threads, and does not change regions that were given a policy.

    Args:
        policy: A built-in name, a `Policy`, or the path of a TOML file. None goes back to how it is at first: mezzo's
            regions have the policy ``"default"``, plain regions are PyTorch's own affair.

    Raises:
        UnknownPolicyError: No built-in policy has this name.
        UnknownOpError: The policy names an op that this PyTorch does not have.
        PolicyError: The policy is for another framework, or has a rule that an op cannot take.

    Example:
        >>> import torch, mezzo.torch
        >>> mezzo.torch.set_default_policy("fp32")
        >>> with torch.autocast("cpu"):
        ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        torch.float32
        >>> mezzo.torch.set_default_policy(None)
    """
    global _default  # noqa: PLW0603 - it is the process-wide default
    if policy is None:
        with _lock:
            _default = None
            for device in _devices_here():
                type(slot_for(device)).default = _by_itself(device)
        compiler.follow("", "")
        return
    resolved = resolve_policy(policy)
    with _lock:
        # Built before anything is set, so a policy that cannot work leaves the old one in force everywhere.
        plans = {device: prepare_plan(resolved, device, "repaired") for device in _devices_here()}
        _default = resolved
        for device, plan in plans.items():
            type(slot_for(device)).default = Active(resolved, plan)
    compiler.follow("", content_of(resolved))


def get_default_policy() -> Policy:
    """Give the policy of regions that name none.

    Returns:
        What `set_default_policy` set last; ``"default"`` at first.

    Example:
        >>> get_default_policy().name
        'default'
    """
    return _default or builtin_policy("default")


def active_policy(device_type: str) -> Policy:
    """Give the policy that rules a device in this thread now.

    Args:
        device_type: A device type such as ``"cpu"``.

    Returns:
        The policy of the innermost region of mezzo's; outside any, what `set_default_policy` has set, and ``"torch"``,
        which is what a plain ``torch.autocast`` region does, before it has set something.

    Raises:
        RuntimeError: The string is no device type.
        DeviceError: There is no autocast for the device.
    """
    slot = slot_for(check_device(device_type))
    follow_default(slot)
    return slot.current().policy


def prepare_plan(policy: Policy, device_type: str, serve: Serve = "changed") -> Plan | None:
    """Build a policy's plan for a device and register the kernels it needs.

    Args:
        policy: The policy.
        device_type: The device type.
        serve: As in `mezzo.torch.plans.build_plan`.

    Returns:
        The plan; None if PyTorch's own kernels do all that the policy says.
    """
    plan = build_plan(policy, device_type, serve=serve)
    install(plan)
    return plan or None


@lru_cache(maxsize=256)
def _active(policy: Policy, name: str, device_type: str) -> Active:  # noqa: ARG001 - equal policies differ in name
    return _make(policy, device_type, "changed")


def _make(policy: Policy, device_type: str, serve: Serve) -> Active:
    # A table that is replaced in another thread meanwhile is to find this one, or this one the new table.
    with _lock:
        active = Active(policy, prepare_plan(policy, device_type, serve))
        if torch._C._get_privateuse1_backend_name() == device_type:
            _on_backends[active] = device_type, serve
        return active


def _by_itself(device_type: str) -> Active:
    """Give what rules a device's plain regions as long as nothing has been set: PyTorch, or the backend's own table."""
    return _of_backends.get(device_type, NOTHING)


def follow_table(device_type: str) -> None:
    """Have all that is in force on an accelerator, or comes to be, follow its table, which is new or has changed.

    Args:
        device_type: The accelerator; `mezzo.torch.backends` knows its table.
    """
    with _lock:
        # Regions, decorated functions, tokens and other threads hold these very objects.
        for active, (device, serve) in list(_on_backends.items()):
            if device == device_type:
                with suppress(UnknownOpError):  # it names a custom op that is gone; this is no reason to refuse a table
                    renew(active, prepare_plan(active.policy, device, serve))
        if device_type not in _of_backends:
            _of_backends[device_type] = _make(builtin_policy("torch"), device_type, "changed")
        slot = slot_for(device_type)
        wanted = _default
        type(slot).default = _by_itself(device_type) if wanted is None else _in_plain_regions(wanted, device_type)
    backend = backend_for(device_type)
    compiler.follow(device_type, "" if backend is None else content_of(backend.policy))


def active_for(policy: PolicyLike, device_type: str) -> Active:
    """Give what a region with this policy puts in force on a device.

    Args:
        policy: As in `mezzo.torch.autocast`.
        device_type: The device type.

    Returns:
        The policy and its plan; for a built-in name the same object at every call, since a region may be made at every step.
    """
    if isinstance(policy, str) and (known := _by_name.get((policy, device_type))) is not None:
        return known
    resolved = resolve_policy(policy)
    active = _active(resolved, resolved.name, device_type)
    if isinstance(policy, str) and not policy.endswith(".toml"):
        _by_name[policy, device_type] = active
    return active


def follow_default(slot: Slot) -> None:
    """Make sure that a device's slot holds the process-wide default.

    `set_default_policy` sets it for the devices of this machine; a backend that was plugged in later meets it here.

    Args:
        slot: The device's slot.
    """
    wanted = _default
    if slot.default.policy is wanted or (wanted is None and slot.default is _by_itself(slot.device_type)):
        return
    with _lock:
        device_type = slot.device_type
        type(slot).default = _by_itself(device_type) if wanted is None else _in_plain_regions(wanted, device_type)


def region_default(slot: Slot) -> Active:
    """Give what a region that names no policy puts in force.

    Args:
        slot: The slot of its device.

    Returns:
        The policy of the region around it, else what `set_default_policy` has set, else ``"default"``.
    """
    if slot.active is not None:
        return slot.active
    policy = _default
    if policy is None:
        # A region may be entered at every step, so this is a look-up and no more.
        return _by_name.get(("default", slot.device_type)) or active_for("default", slot.device_type)
    return active_for(policy, slot.device_type)


def _in_plain_regions(policy: Policy, device_type: str) -> Active:
    """Give what rules plain ``torch.autocast`` regions: mezzo serves what it watches in its own."""
    return _make(policy, device_type, "repaired")


def _devices_here() -> list[str]:
    """Name the device types that can run on this machine: the CPU and the accelerator, if there is one."""
    found = ["cpu", *backends()]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.amp.is_autocast_available(accelerator.type):
        found.append(accelerator.type)
    return list(dict.fromkeys(found))


@contextmanager
def policy_on(device_type: str, policy: PolicyLike) -> Iterator[None]:
    """Make a policy active on a device in this thread, without touching PyTorch's autocast state.

    Regions do this themselves. It is for code that sets PyTorch's state by hand, such as tests on fake tensors of a device
    that is not there.

    Args:
        device_type: The device type.
        policy: As in `mezzo.torch.autocast`.

    Yields:
        Nothing.
    """
    slot = slot_for(device_type)
    before = slot.enter(active_for(policy, device_type))
    try:
        yield
    finally:
        slot.leave(before)
