"""The active policy: which plan a thread's kernels follow now, per device.

PyTorch's own state (enabled, dtype, cache flag, nesting) says whether and how low autocast computes; this says by which
table. A region sets it for its thread and restores it; outside a region of mezzo's the process-wide default rules, which is
how `mezzo.torch.set_default_policy` steers plain ``torch.autocast`` regions.

What a region sets is also kept in PyTorch's own thread state, which autograd carries into the threads that run a backward
pass: there the region's policy rules as its enabled flag does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident

import torch

from mezzo.builtin import builtin_policy
from mezzo.policy import Policy
from mezzo.torch.plans import Plan

__all__ = ["Active", "Slot", "slot_for"]


@dataclass(frozen=True, slots=True)
class Active:
    """A policy in force on a device.

    Attributes:
        policy: The policy.
        plan: What mezzo serves under it; None where PyTorch's own kernels do all that it says.
    """

    policy: Policy
    plan: Plan | None


# PyTorch 2.11 can put an object into its thread state but not take it out again; there a policy is not carried.
_CARRIES = hasattr(torch._C, "_remove_obj_from_tls")
_MAIN_THREAD = threading.main_thread().ident
_NOTHING = Active(builtin_policy("torch"), None)


class Slot(threading.local):
    """The active policy of one device: one value per thread over one for the process.

    Each device has a subclass of its own, whose class attributes are what a thread finds that has set nothing.

    Attributes:
        device_type: The device.
        key: Where PyTorch's thread state holds what a region has set.
        active: What a region has set in this thread; None outside any.
        outer: What PyTorch's thread state held when the thread's outermost region was entered.
        default: What rules outside any region, in the whole process.
        observer: What an open `mezzo.torch.observe` uses to make plans that look in.
    """

    device_type: str = ""
    key: str = ""
    active: Active | None = None
    outer: Active | None = None
    default: Active = _NOTHING
    observer: Callable[[Policy], Plan] | None = None

    def current(self) -> Active:
        """Give what rules this thread.

        That is its region's policy, else that of the thread whose backward pass it runs, else the process-wide default.
        """
        active = self.active
        if active is not None:
            return active
        active = self._carried() or self.default
        if _observers and self.observer is not None:
            return Active(active.policy, self.observer(active.policy))
        return active

    def observe(self, observer: Callable[[Policy], Plan] | None) -> None:
        """Set this thread's observer, or take it away."""
        global _observers  # noqa: PLW0603 - saves every region a look at its thread's state
        with _lock:
            _observers += (observer is not None) - (self.observer is not None)
        self.observer = observer

    def _carried(self) -> Active | None:
        """Give what PyTorch's thread state holds; in a thread of autograd's, what the caller of ``backward`` had set."""
        return torch._C._get_obj_in_tls(self.key) if torch._C._is_key_in_tls(self.key) else None

    def enter(self, active: Active) -> Active | None:
        """Put a policy in force in this thread.

        Args:
            active: The policy and its plan; an open observer puts its own plan in the place of the latter.

        Returns:
            What was in force, for `leave`.
        """
        before = self.active
        if before is None and get_ident() != _MAIN_THREAD:
            # Autograd never carries anything into the main thread, so that one need not ask.
            self.outer = self._carried()
        if _observers and self.observer is not None:
            active = Active(active.policy, self.observer(active.policy))
        self.active = active
        if _CARRIES:
            torch._C._stash_obj_in_tls(self.key, active)
        return before

    def leave(self, before: Active | None) -> None:
        """Undo `enter`."""
        self.active = before
        if not _CARRIES:
            return
        carried = self.outer if before is None else before
        if carried is not None:
            torch._C._stash_obj_in_tls(self.key, carried)
        else:
            # Not left behind as None: a thread that ends with a Python object in PyTorch's state needs the GIL to drop it,
            # and takes the process down with it if the interpreter is on its way out by then.
            torch._C._remove_obj_from_tls(self.key)


_slots: dict[str, Slot] = {}
_lock = threading.Lock()
_observers = 0  # in all threads


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
                attributes = {"device_type": device_type, "key": f"mezzo.active.{device_type}"}
                slot = _slots[device_type] = type(f"Slot[{device_type}]", (Slot,), attributes)()
    return slot
