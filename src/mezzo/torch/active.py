"""The active policy: which plan a thread's kernels follow now, per device.

PyTorch's own state (enabled, dtype, cache flag, nesting) says whether and how low autocast computes; this says by which
table. A region sets it for its thread and restores it; outside a region of mezzo's the process-wide default rules, which is
how `set_default_policy` steers plain ``torch.autocast`` regions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mezzo.builtin import builtin_policy
from mezzo.policy import Policy
from mezzo.torch.plans import Plan

__all__ = ["Slot", "slot_for", "slots"]


class Slot(threading.local):
    """The active plan of one device, with one value per thread.

    Each device has a subclass of its own: a thread that has set nothing finds the subclass's attributes, which are the
    process-wide default. So the kernels read one attribute, whether or not a region is open.

    Attributes:
        plan: The active plan; None where PyTorch's own kernels do everything.
        policy: The active policy.
        device_type: The device, on the subclass.
        observer: What an open `mezzo.torch.observe` uses to make plans that look in.
    """

    plan: Plan | None = None
    policy: Policy = builtin_policy("torch")
    device_type: str = ""
    observer: Callable[[Policy], Plan] | None = None

    def set(self, plan: Plan | None, policy: Policy) -> None:
        """Set the thread's plan and policy; an observer puts its own plan in the place of the policy's."""
        self.plan = plan if self.observer is None else self.observer(policy)
        self.policy = policy

    def save(self) -> dict[str, object]:
        """Give what the thread has set, to be handed to `restore`."""
        return self.__dict__.copy()

    def restore(self, saved: dict[str, object]) -> None:
        """Undo what was set since `save`: also back to following the process-wide default."""
        self.__dict__.clear()
        self.__dict__.update(saved)


_slots: dict[str, Slot] = {}
_lock = threading.Lock()


def slot_for(device_type: str) -> Slot:
    """Give the slot of a device type; one per process.

    Args:
        device_type: A device type.
    """
    slot = _slots.get(device_type)
    if slot is None:
        with _lock:
            slot = _slots.get(device_type)
            if slot is None:
                slot = _slots[device_type] = type(f"Slot[{device_type}]", (Slot,), {"device_type": device_type})()
    return slot


def slots() -> dict[str, Slot]:
    """Give all slots by device type."""
    return dict(_slots)
