"""Which policy is in force: the process-wide default, and what a region puts in its place."""

from __future__ import annotations

from mezzo.builtin import PolicyLike, builtin_policy, resolve_policy
from mezzo.errors import DeviceError
from mezzo.policy import Policy
from mezzo.tensorplay.plans import DEVICES, devices_here, ops_of
from mezzo.tensorplay.state import thread_state

__all__ = ["active_policy", "get_default_policy", "resolved", "set_default_policy"]

_default: list[Policy] = []


def resolved(policy: PolicyLike) -> Policy:
    """Turn what a caller passed as ``policy=`` into a policy for TensorPlay that can be put in force.

    Args:
        policy: A built-in name, a `Policy`, or the path of a TOML file.

    Returns:
        The policy; its plans are made, so that what is wrong with it is said here.

    Raises:
        UnknownPolicyError: No built-in policy has this name.
        UnknownOpError: The policy names an op that TensorPlay does not have.
        PolicyError: The policy is for another framework, or has a rule that an op cannot take.
    """
    found = resolve_policy(policy, framework="tensorplay")
    ops_of(found, devices_here())
    return found


def set_default_policy(policy: PolicyLike | None) -> None:
    """Set the policy of mezzo's regions that name none and have no region around them.

    The setting is for the process; regions that are open keep theirs. TensorPlay's own regions are not affected, except
    those that are entered inside of one of mezzo's.

    Args:
        policy: A built-in name, a `Policy`, or the path of a TOML file. None goes back to ``"default"``.

    Raises:
        UnknownPolicyError: No built-in policy has this name.
        UnknownOpError: The policy names an op that TensorPlay does not have.
        PolicyError: The policy is for another framework, or has a rule that an op cannot take.

    Example:
        >>> import tensorplay, mezzo.tensorplay
        >>> mezzo.tensorplay.set_default_policy("fp32")
        >>> with mezzo.tensorplay.autocast("cpu"):
        ...     print((tensorplay.ones(2, 2) @ tensorplay.ones(2, 2)).dtype)
        tensorplay.float32
        >>> mezzo.tensorplay.set_default_policy(None)
    """
    _default[:] = [] if policy is None else [resolved(policy)]


def get_default_policy() -> Policy:
    """Give the policy of regions that name none and have none around them.

    Returns:
        What `set_default_policy` set last; ``"default"`` at first.

    Example:
        >>> get_default_policy().name
        'default'
    """
    return _default[0] if _default else builtin_policy("default", framework="tensorplay")


def active_policy(device_type: str = "cpu") -> Policy:
    """Give the policy that rules a device in this thread now.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        The policy of the innermost region of mezzo's; outside any, the default.

    Raises:
        DeviceError: TensorPlay has no autocast for the device.

    Example:
        >>> active_policy("cpu").name
        'default'
    """
    if device_type not in DEVICES:
        msg = f"TensorPlay has no autocast for device type {device_type!r}; allowed are {', '.join(DEVICES)}."
        raise DeviceError(msg)
    state = thread_state()
    return state.now.devices[device_type].policy if state.depth else get_default_policy()
