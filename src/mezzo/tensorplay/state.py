"""What a thread's regions have set: per device type a switch, a dtype and a policy, and one switch for kept casts.

While a thread is in a region this state takes the place of TensorPlay's own, which is off for as long: its kernels would
cast what reaches them, by their table. It starts as TensorPlay's stood when the outermost region was entered.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import tensorplay

from mezzo.policy import Policy
from mezzo.tensorplay.current import CURRENT, Plan
from mezzo.tensorplay.dtypes import LOW, dtype_name
from mezzo.tensorplay.plans import DEVICES, plan_for, plan_on_devices
from mezzo.tensorplay.weight_casts import WeightCasts

__all__ = ["NATIVE", "DeviceState", "Snapshot", "ThreadState", "thread_state"]


class _Native:
    """TensorPlay's own state, whatever stands in the place of its functions while a region is open."""

    is_enabled = staticmethod(tensorplay._C.is_autocast_enabled)
    set_enabled = staticmethod(tensorplay._C.set_autocast_enabled)
    dtype = staticmethod(tensorplay._C.get_autocast_dtype)
    is_cache_enabled = staticmethod(tensorplay._C.is_autocast_cache_enabled)


NATIVE = _Native()


class DeviceState(NamedTuple):
    """What is in force on one device type.

    Attributes:
        enabled: Whether ops are cast.
        dtype: To which lower-precision dtype.
        policy: By which policy.
    """

    enabled: bool
    dtype: Any
    policy: Policy


class Snapshot(NamedTuple):
    """What is in force in a thread.

    Attributes:
        devices: Each device type's state.
        cache_enabled: Whether casts of weights are kept.
        plan: What the devices' states come to, so that it is put together once.
    """

    devices: dict[str, DeviceState]
    cache_enabled: bool
    plan: Plan | None


_NOTHING = Snapshot({}, cache_enabled=True, plan=None)


class ThreadState(threading.local):
    """One thread's state.

    Attributes:
        depth: How many regions of mezzo's the thread is in.
        now: What is in force; nothing outside of regions.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.now = _NOTHING
        self._kept = WeightCasts()
        self._switched_off: list[str] = []

    def open(self, default: Policy) -> Snapshot:
        """Enter a region; the outermost one takes over from TensorPlay's state.

        Args:
            default: The policy of regions that name none.

        Returns:
            What is in force, to be put back on leaving.
        """
        if self.depth == 0:
            devices = {name: DeviceState(NATIVE.is_enabled(name), NATIVE.dtype(name), default) for name in DEVICES}
            self._switched_off = [name for name in DEVICES if devices[name].enabled]
            plan = _plan_of(devices) if self._switched_off else None
            self.now = Snapshot(devices, NATIVE.is_cache_enabled(), plan)
            for name in self._switched_off:
                NATIVE.set_enabled(name, False)
            CURRENT.kept = self._kept
        self.depth += 1
        return self.now

    def close(self, before: Snapshot) -> None:
        """Leave a region; with the outermost one TensorPlay's state is back, and no cast is kept.

        Args:
            before: What `open` gave.
        """
        self.depth -= 1
        if self.depth:
            self.put(before)
            return
        self.now = _NOTHING
        CURRENT.plan = CURRENT.casts = CURRENT.kept = None
        self._kept.clear()
        for name in self._switched_off:
            NATIVE.set_enabled(name, True)

    def native_ended(self, device: str) -> None:
        """Take down what TensorPlay's own state is once a region of its own, around mezzo's, has ended inside them."""
        enabled = NATIVE.is_enabled(device)
        self._switched_off = [name for name in self._switched_off if name != device] + [device] * enabled
        NATIVE.set_enabled(device, False)

    def set(self, device: str, cache_enabled: bool | None = None, **changed: Any) -> None:
        """Change what is in force on one device.

        Args:
            device: A device type.
            cache_enabled: Whether casts of weights are kept; None leaves that as it is.
            **changed: Fields of `DeviceState`.
        """
        now = self.now
        devices = {**now.devices, device: now.devices[device]._replace(**changed)}
        self.put(Snapshot(devices, now.cache_enabled if cache_enabled is None else cache_enabled, _plan_of(devices)))

    def put(self, snapshot: Snapshot) -> None:
        """Put something in force."""
        self.now = snapshot
        CURRENT.plan = snapshot.plan
        CURRENT.casts = self._kept if snapshot.cache_enabled else None

    def forget_casts(self) -> None:
        """Drop the kept casts of weights."""
        self._kept.drop()


def _plan_of(devices: dict[str, DeviceState]) -> Plan | None:
    return plan_on_devices(
        {
            name: plan_for(state.policy, name, label)
            for name, state in devices.items()
            if state.enabled and (label := dtype_name(state.dtype)) in LOW  # a setter of TensorPlay's takes others
        }
    )


_STATE = ThreadState()


def thread_state() -> ThreadState:
    """Give the state of the thread that asks."""
    return _STATE
