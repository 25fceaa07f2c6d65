"""What became of the steps of each optimizer: what a scaler tells about them after `update` too."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import ScalerProtocolError

from .nonfinite import Overflow

__all__ = ["History", "Steps"]


class Steps:
    """The steps of one optimizer under one scaler.

    Attributes:
        found: The verdict of the last step: float32, of no dimension, on the device; 0 if it was made. None before the
            first.
        overflow: What is known of the last step, if it was skipped and the host knows that.
        parameters: How many parameters the optimizer had when ``meshes`` was made.
        meshes: The device meshes of its parameters.
        unread: How many steps were decided on the device, and not read since.
    """

    def __init__(self) -> None:
        self.found: Tensor | None = None
        self.overflow: Overflow | None = None
        # The first gradient of a step that the device decided on, and its version.
        self.probe: list[tuple[weakref.ref[Tensor], int]] = []
        self._idle = False
        self._taken = 0
        self._in_a_row = 0
        self.parameters = -1
        self.meshes: tuple[Any, ...] = ()
        self.unread = 0
        # Of those, the skipped ones: all, and in a row.
        self._skipped: Tensor | None = None

    def made(self, found: Tensor) -> None:
        """Take down a step that was made."""
        self._idle = False
        self._settle()
        self.found, self.overflow = found, None
        self._taken += 1
        self._in_a_row = 0

    def skipped(self, found: Tensor) -> int:
        """Take down a step that was skipped; gives how many were in a row."""
        self._idle = False
        self._settle()
        self.found = found
        self._in_a_row += 1
        return self._in_a_row

    def decided_on_device(self, found: Tensor) -> None:
        """Take down a step of which the host does not know whether it was made; no host read."""
        self._idle = False
        self.found, self.overflow = found, None
        now = (found > 0).int()
        if self._skipped is None:
            self._skipped = torch.stack([now, now * (self._in_a_row + 1)])
        else:
            all_of_them, in_a_row = self._skipped.unbind()
            self._skipped = torch.stack([all_of_them + now, (in_a_row + 1) * now])
        self.unread += 1

    def idle(self) -> None:
        """Take down a step without gradients."""
        self._idle = True

    @property
    def known(self) -> bool:
        """Whether there was any."""
        return self._idle or self.found is not None

    def last_was_made(self) -> bool | None:
        """Say whether the last step was made; None before the first. Reads the device if that is not known."""
        if self._idle or self.found is None:
            return False if self._idle else None
        self._settle()
        return self._in_a_row == 0

    def taken(self) -> int:
        """Count the steps that were made. Reads the device if that is not known."""
        self._settle()
        return self._taken

    def in_a_row(self) -> int:
        """Count the steps skipped since the last one that was made. Reads the device if that is not known."""
        self._settle()
        return self._in_a_row

    def _settle(self) -> None:
        if self._skipped is None:
            return
        skipped, self._in_a_row = self._skipped.tolist()
        self._taken += self.unread - skipped
        self.unread, self._skipped = 0, None


class History:
    """The steps of all optimizers that a scaler has seen; it keeps none of them alive."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[Any, Steps]] = {}

    def of(self, optimizer: torch.optim.Optimizer) -> Steps:
        """Give the record of an optimizer; a new one the first time."""
        known = self._steps.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        steps = Steps()
        self._steps[id(optimizer)] = (self._reference(optimizer), steps)
        return steps

    def seen(self, optimizer: torch.optim.Optimizer, asked: str) -> Steps:
        """Give the record of an optimizer that was given to `step` before.

        Raises:
            ScalerProtocolError: It was not.
        """
        known = self._steps.get(id(optimizer))
        if known is None or known[0]() is not optimizer or not known[1].known:
            msg = (
                f"{asked} was asked about an optimizer of type {type(optimizer).__name__} of which this scaler has seen no "
                "step. Call scaler.step(optimizer) first."
            )
            raise ScalerProtocolError(msg)
        return known[1]

    def all(self) -> list[tuple[torch.optim.Optimizer, Steps]]:
        """List the optimizers that are alive, with their records."""
        return [(optimizer, steps) for get, steps in self._steps.values() if (optimizer := get()) is not None]

    def _reference(self, optimizer: torch.optim.Optimizer) -> Any:
        key = id(optimizer)
        try:
            return weakref.ref(optimizer, lambda gone: self._forget(key, gone))
        except TypeError:
            return lambda: optimizer  # no weak references to it: kept alive

    def _forget(self, key: int, gone: object) -> None:
        # The id may have been given to another optimizer meanwhile.
        if key in self._steps and self._steps[key][0] is gone:
            del self._steps[key]
