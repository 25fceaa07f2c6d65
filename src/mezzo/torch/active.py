"""The active policy: which plan a thread's kernels follow now, per device.

PyTorch's own state (enabled, dtype, cache flag, nesting) says whether and how low autocast computes; this says by which
table. A region sets it for its thread and restores it; outside a region of mezzo's the process-wide default rules, which is
how `mezzo.torch.set_default_policy` steers plain ``torch.autocast`` regions.

What a region sets is also written into PyTorch's own thread state, as a token (`mezzo.torch.tokens`), and autograd carries
that into the threads that run a backward pass: there the region's policy rules as its enabled flag does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident

import torch

from mezzo.builtin import builtin_policy
from mezzo.policy import Policy
from mezzo.torch.plans import Plan
from mezzo.torch.tokens import IN_GRAPH, THREAD, Move, Scope, Step, active_on, clear, read, step_to

__all__ = ["NOTHING", "Active", "Found", "Slot", "hear_of_entries", "renew", "slot_for"]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Active:
    """A policy in force on a device. Only `renew` changes one.

    Attributes:
        policy: The policy.
        plan: What mezzo serves under it; None where PyTorch's own kernels do all that it says.
        steps: By the scope that an entry finds: what it does to the thread's token.
    """

    policy: Policy
    plan: Plan | None
    steps: dict[Scope, Step] = field(default_factory=dict, repr=False)


def renew(active: Active, plan: Plan | None) -> None:
    """Put another plan under a policy that is in force, since the device's own table has changed.

    Args:
        active: The policy in force; whoever holds it follows.
        plan: What mezzo serves under it from now on.
    """
    object.__setattr__(active, "plan", plan)
    active.steps.clear()


Found = tuple[Active | None, Scope, tuple[Move, ...]]
"""What an entry finds: the policy in force and the thread's scope; and the calls that take the token back there."""


# PyTorch 2.11 can put an object into its thread state but not take it out again; there only tokens are carried.
_CARRIES = hasattr(torch._C, "_remove_obj_from_tls")
_MAIN_THREAD = threading.main_thread().ident
NOTHING = Active(builtin_policy("torch"), None)
"""What rules a plain region as long as nothing has been set: PyTorch itself."""


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
    default: Active = NOTHING
    observer: Callable[[Policy], Plan] | None = None

    def current(self) -> Active:
        """Give what rules this thread.

        That is its region's policy, else that of the thread whose backward pass it runs, else the process-wide default.
        Where a region is open inside of a graph, that is traced or run, it is that region's.
        """
        active = self.active
        if IN_GRAPH:
            traced = active_on(self.device_type)
            if traced is not None and (active is None or active.policy != traced.policy):
                return self._observed(traced)
        if active is not None:
            return active
        return self._observed(self._carried() or self.default)

    def _observed(self, active: Active) -> Active:
        if _observers and self.observer is not None:
            return Active(active.policy, self.observer(active.policy))
        return active

    def _looked_at(self, active: Active) -> Active:
        for hears in _hearing.entries:
            hears(active)
        return active if self.observer is None else Active(active.policy, self.observer(active.policy))

    def observe(self, observer: Callable[[Policy], Plan] | None) -> None:
        """Set this thread's observer, or take it away."""
        global _observers  # noqa: PLW0603 - saves every region a look at its thread's state
        with _lock:
            _observers += (observer is not None) - (self.observer is not None)
        self.observer = observer

    def _carried(self) -> Active | None:
        """Give what the thread whose backward pass this one runs has in force; None in any other thread."""
        if get_ident() == _MAIN_THREAD:
            return None
        if _in_state and torch._C._is_key_in_tls(self.key):
            return torch._C._get_obj_in_tls(self.key)  # type: ignore[no-any-return]
        return active_on(self.device_type)

    def enter(self, active: Active) -> Found:
        """Put a policy in force in this thread.

        Args:
            active: The policy and its plan; an open observer puts its own plan in the place of the latter.

        Returns:
            What was in force, for `leave`.
        """
        before, thread = self.active, THREAD
        known = scope = thread.scope
        if before is None and get_ident() != _MAIN_THREAD:
            # Autograd never carries anything into the main thread, so that one need not ask.
            self.outer, scope = self._carried(), read()
        elif IN_GRAPH:
            scope = read()
        step = active.steps.get(scope)
        if step is None or active is NOTHING:  # that one is not of one device
            step = step_to(scope, self.device_type, active)
        thread.scope, moves, back = step
        for function, device, value in moves:
            function(device, value)
        if _observers:
            active = self._looked_at(active)
        self.active = active
        if _in_state or (_observers and self.observer is not None) or not step[0].has_own:
            self._keep_in_state(active)
        return before, known, back

    def leave(self, found: Found | None) -> None:
        """Undo `enter`.

        Args:
            found: What it gave; None to have nothing in force, whatever was.
        """
        if found is None:
            before = None
            clear()
        else:
            before, THREAD.scope, back = found
            for function, device, value in back:
                function(device, value)
        self.active = before
        if _in_state:
            self._keep_in_state(self.outer if before is None else before)

    def _keep_in_state(self, active: Active | None) -> None:
        """Keep in PyTorch's thread state what no token says: an observer's plan, a policy that came too late for one."""
        global _in_state  # noqa: PLW0603 - saves every region a look at its thread's state
        if not _CARRIES:
            return
        _in_state = True
        if active is not None:
            torch._C._stash_obj_in_tls(self.key, active)
        elif torch._C._is_key_in_tls(self.key):
            # Not left behind as None: a thread that ends with a Python object in PyTorch's state needs the GIL to drop it,
            # and takes the process down with it if the interpreter is on its way out by then.
            torch._C._remove_obj_from_tls(self.key)


_slots: dict[str, Slot] = {}
_lock = threading.RLock()
_observers = 0  # in all threads; and who hears of entries
_in_state = False  # whether anything has been kept in PyTorch's thread state


class _Hearing(threading.local):
    """Who hears of the policies that a thread puts in force."""

    entries: tuple[Callable[[Active], None], ...] = ()


_hearing = _Hearing()


@contextmanager
def hear_of_entries(hears: Callable[[Active], None]) -> Iterator[None]:
    """Call a function with each policy that a region of this thread puts in force, before its first op.

    Args:
        hears: The function.
    """
    global _observers  # noqa: PLW0603 - saves every region a look at its thread's state
    _hearing.entries = (*_hearing.entries, hears)
    with _lock:
        _observers += 1
    try:
        yield
    finally:
        rest = list(_hearing.entries)
        rest.remove(hears)
        _hearing.entries = tuple(rest)
        with _lock:
            _observers -= 1


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
