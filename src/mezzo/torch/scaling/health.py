"""What the host knows of a run without waiting for the device: how low the scale may be, and how the last iterations went.

A step of an unmodified optimizer reads its verdict anyway. A step that is decided on the device reads nothing; there the
verdict travels to the host without anybody waiting for it, and is looked at `LAG` iterations later, by when it has long been
there. After a fixed number, and not whenever it arrives, so that a run is the same each time and on every rank.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["LAG", "Health", "unknown_flags"]

LAG = 4
"""How many iterations later the host looks at what it did not wait for; 0 on a CPU, where there is nothing to wait for."""


@dataclass
class _Note:
    """Numbers on their way to the host.

    Attributes:
        numbers: Flags for non-finite, and as in `Health.learn`, and the scale after the iteration; on the CPU, not to be
            read before ``arrived``.
        arrived: None on a CPU.
        fallen: The logarithm of what the scale may have fallen by, up to when they were sent.
        learn: Whether the host has yet to learn how the iteration went.
    """

    numbers: Tensor
    arrived: torch.Event | None
    fallen: float
    learn: bool


class Health:
    """The host's view of one scaler. Not for several threads, as the scaler.

    Args:
        scale: The scale at the start.

    Attributes:
        skips: How many iterations in a row were not finite.
        settled: Whether there was a finite iteration yet.
    """

    def __init__(self, scale: float) -> None:
        self.skips = 0
        self.settled = False
        self._scale = scale
        self._fallen = 0.0
        self._run: list[Tensor | bool | None] = []
        self._notes: deque[_Note] = deque()

    @property
    def at_least(self) -> float:
        """The scale is not lower than this."""
        if not self._fallen:
            return self._scale
        # Less by a hair, for the rounding of the scale and of the logarithm.
        return self._scale * math.exp(self._fallen) * 0.999

    def forget(self) -> None:
        """Count with any scale: somebody else has changed it."""
        self.know(0.0)

    def know(self, scale: float) -> None:
        """Take in a scale that was set or read."""
        for note in self._notes:
            note.fallen -= self._fallen
        self._scale, self._fallen = scale, 0.0

    def fell(self, factor: float) -> None:
        """Take in that the scale may have been multiplied by a factor below 1."""
        self._fallen += math.log(factor)

    def learn(self, *, found: bool, flags: Tensor | bool | None) -> None:
        """Take in how an iteration went.

        Args:
            found: Whether a gradient was not finite.
            flags: If so: any NaN, any Inf, and whether neither is known; float32, on the device. Or, if the host knows,
                whether there was NaN only. None if nobody looked.
        """
        if found:
            self.skips += 1
            self._run.append(flags)
        else:
            self.skips = 0
            self._run.clear()
            self.settled = True

    def nan_backoffs(self) -> int:
        """Count the iterations that were not finite and had NaN only, up to the last one known.

        Reads the device: call it when many have failed in a row. The last one has to be known to be NaN only; an earlier
        one that nobody looked at in time counts with its neighbours.
        """
        unread = [at for at, flags in enumerate(self._run) if isinstance(flags, Tensor)]
        if unread:
            read = torch.stack([self._run[at] for at in unread]).tolist()  # type: ignore[misc]
            for at, three in zip(unread, read, strict=True):
                self._run[at] = _nan_only(*three)
        if not self._run or self._run[-1] is not True:
            return 0
        length = 0
        for nan_only in reversed(self._run):
            if nan_only is False:
                break
            length += 1
        return length

    def send(self, found: Tensor, flags: Tensor | None, scale: Tensor, *, learn: bool) -> None:
        """Send to the host how an iteration went, and the scale after it."""
        if flags is None:
            flags = unknown_flags(found.device)
        numbers = torch.cat([found.reshape(1), flags, scale.reshape(1)])
        arrived = None
        if numbers.device.type != "cpu":
            if not _has_events(numbers.device.type):
                return  # what is not known stays so, and gradients are looked at twice
            arrived = torch.Event(numbers.device.type)
            numbers = numbers.to("cpu", non_blocking=True)
            arrived.record()
        self._notes.append(_Note(numbers, arrived, self._fallen, learn))

    def look(self, lag: int) -> int:
        """Read what was sent at least ``lag`` notes ago; gives how many skipped iterations that told of."""
        skipped = 0
        while len(self._notes) > lag:
            note = self._notes.popleft()
            if note.arrived is not None:
                note.arrived.synchronize()
            found, nan, inf, unknown, scale = note.numbers.tolist()
            since = self._fallen - note.fallen
            self.know(scale)
            self._fallen = since
            for later in self._notes:
                later.fallen += since
            if note.learn:
                self.learn(found=bool(found), flags=_nan_only(nan, inf, unknown))
                skipped += bool(found)
        return skipped


@lru_cache(maxsize=8)
def _has_events(device_type: str) -> bool:
    """Say whether one can wait for a device; some that are plugged in make events, and cannot wait for one."""
    try:
        event = torch.Event(device_type)
        if device_type == torch._C._get_privateuse1_backend_name():
            event.record()
            event.synchronize()
    except RuntimeError:
        return False
    return True


def unknown_flags(device: torch.device) -> Tensor:
    """Give the flags of which nothing is known, made on the device: copying numbers there would wait for it."""
    return torch.cat([torch.zeros(2, device=device), torch.ones(1, device=device)])


def _nan_only(nan: float, inf: float, unknown: float) -> bool | None:
    return None if unknown else bool(nan) and not inf
