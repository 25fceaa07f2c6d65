"""What threads and the process know of O1, and how the casts of a thread are put back after an exception."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from mezzo.policy import Policy
from mezzo.torch.autocast import autocast
from mezzo.torch.switch import KEY

__all__ = [
    "DISABLED",
    "HERE",
    "OFF",
    "ON",
    "PROCESS",
    "Flags",
    "Started",
    "Switched",
    "drop_dead",
    "nesting",
    "started",
    "undo",
]

OFF, ON, DISABLED = "off", "on", "disabled"
"""Why casts were turned off or on: for a backward pass or step, for a closure in it, by the user."""

Flags = tuple[tuple[str, bool], ...]
"""Device types and whether autocast is enabled."""


@dataclass(frozen=True, eq=False, slots=True)
class Started:
    """O1 as it was started.

    Attributes:
        device_types: On which devices.
        dtype: The lower-precision dtype.
        policy: Which op runs in which dtype.
        keeps_casts: Whether a weight is cast once per ``forward`` of a watched model, and not at each use.
    """

    device_types: tuple[str, ...]
    dtype: torch.dtype
    policy: Policy
    keeps_casts: bool = True

    def regions(self) -> list[autocast]:
        """Make the regions of a thread."""
        return [autocast(one, self.dtype, cache_enabled=False, policy=self.policy) for one in self.device_types]


class Switched:
    """One change of the casts in a thread, to be undone.

    Attributes:
        kind: ``OFF``, ``ON`` or ``DISABLED``.
        owner: Who undoes it; the frame of a step ends it too when it is gone.
        flags: What was found.
        nesting: How many regions were open.
        watched: Whether mezzo's look at calls (`mezzo.torch.switch`) is to be on again; None if it was left as it was.
    """

    __slots__ = ("flags", "kind", "nesting", "owner", "watched")

    def __init__(self, kind: str, owner: object, flags: Flags, nesting: int, watched: bool | None = None) -> None:
        self.kind, self.owner, self.flags, self.nesting, self.watched = kind, owner, flags, nesting, watched


class _Here(threading.local):
    """O1 in a thread.

    Attributes:
        started: What the thread has entered.
        regions: Its regions.
        nesting: How many regions were open when it had entered them.
        is_inner: Whether there were others before.
        device: One on which they have turned autocast on.
        switched: What turned casts off or on since, the last one last.
        forwards: The watched models whose ``forward`` runs: PyTorch's frame and the cache flag found.
        is_late: Whether the thread was to enter or leave while casts were off.
    """

    started: Started | None = None
    nesting = 0
    is_inner = False
    device: str | None = None
    is_late = False

    def __init__(self) -> None:
        self.regions: list[autocast] = []
        self.switched: list[Switched] = []
        self.forwards: list[tuple[FrameType, bool]] = []


class _Process:
    """O1 in the process.

    Attributes:
        started: What threads are to enter; None while O1 is off.
    """

    started: Started | None = None
    watches_forks = False


HERE = _Here()
PROCESS = _Process()

_increment, _decrement = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled


def started() -> Started | None:
    """Give O1 as it was started; None while it is off."""
    return PROCESS.started


def nesting() -> int:
    """Count the regions that are open in this thread."""
    _increment()
    return int(_decrement())


def drop_dead() -> None:
    """Undo what a step or a ``forward`` that ended in an exception has left behind in this thread."""
    here = HERE
    alive = _frames()
    dead = next((place for place, (frame, _) in enumerate(here.forwards) if frame not in alive), None)
    if dead is not None:
        torch.set_autocast_cache_enabled(here.forwards[dead][1])
        del here.forwards[dead:]
    for place in reversed(range(len(here.switched))):
        switched = here.switched[place]
        is_dead = isinstance(switched.owner, FrameType) and switched.owner not in alive
        # In a region that was opened since, casts are as it says; it comes back to this when it is left.
        if is_dead and nesting() <= switched.nesting:
            undo(place)


def undo(place: int) -> None:
    """Undo one change of the casts in this thread.

    Args:
        place: Its place in ``HERE.switched``.
    """
    here = HERE
    switched = here.switched.pop(place)
    if place < len(here.switched):
        # One that was begun later is still open, as in a generator: when it ends it puts back what this one had found.
        later = here.switched[place]
        later.flags = switched.flags
        later.watched = switched.watched if later.watched is None else later.watched
        return
    if switched.watched is not None:
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, switched.watched)
    # A region that has ended since has put back what it had found.
    if nesting() >= switched.nesting:
        for device, enabled in switched.flags:
            _set_enabled(device, enabled)


def _frames() -> set[FrameType]:
    frames: set[FrameType] = set()
    frame: Any = sys._getframe(2)
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back
    return frames
