"""What a `GradScaler` tells a history in each iteration: kept on the device until somebody asks.

Nothing here waits for the device but `Recording._read`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import OptionError
from mezzo.torch.scaling import clipping

from .device_rows import DeviceRows
from .unscaling import is_capturing
from .updating import add_up

__all__ = ["Recording", "ScaleRow"]


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One iteration of a scaler, from `GradScaler.scale` to `GradScaler.update`.

    Attributes:
        step: Which one, as `ScaleHistory` counts.
        scale: The scale of its losses, before `update` moved it.
        skipped: Whether gradients were Inf or NaN, so that a step was left out.
        norm: The norm of the gradients without the scale; None if nobody took it.

    Example:
        >>> ScaleRow(step=0, scale=1024.0, skipped=False, norm=None).scale
        1024.0
    """

    step: int
    scale: float
    skipped: bool
    norm: float | None


@dataclass(frozen=True, slots=True)
class _Note:
    """What the host knows of a row; the rest are three numbers on the device: scale, not 0 if skipped, norm.

    Attributes:
        step: As in `ScaleRow`.
        skipped: None if the device decided, and has the number.
        has_norm: Whether there is a norm.
    """

    step: int
    skipped: bool | None
    has_norm: bool

    def row(self, numbers: list[float]) -> ScaleRow:
        scale, found, norm = numbers
        skipped = bool(found) if self.skipped is None else self.skipped
        return ScaleRow(self.step, scale, skipped, norm if self.has_norm else None)


class Recording:
    """The part of a `ScaleHistory` that a scaler talks to."""

    _norms: bool
    _scaler: Callable[[], Any]

    def _begin(self, keep: int, rows: Iterable[ScaleRow], following: int) -> None:
        """Have these rows and nothing unread, and be at the start of an iteration, the one with this number."""
        self._keep = keep
        self._next = following
        self._rows: deque[ScaleRow] = deque(rows, maxlen=keep)
        self._unread: deque[_Note] = deque(maxlen=keep)
        self._numbers = DeviceRows(keep)
        # Of the row that has its scale.
        self._begun: tuple[Tensor, ...] | None = None
        self._seen_norms: list[Tensor | float] = []
        self._given_norm = False

    def _take_norm(self, norm: Tensor | float) -> None:
        self._given_norm = True
        self._keep_norm(norm)

    def _take_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the norm of gradients that are about to be stepped with, scaled or not."""
        scaler: Any = self._scaler()
        if not self._norms or self._given_norm or scaler is None:
            return
        scaled, unscaled = scaler._gradients_of(optimizer)
        if not scaled and not unscaled:
            return
        scale = scaler._scale_or_one()
        if not scaled:
            # As scaled by one: the norm of such gradients is never rounded to float16.
            scaled, unscaled, scale = unscaled, [], torch.ones((), device=unscaled[0].device)
        with torch.no_grad():
            self._keep_norm(clipping._norms(scaled, unscaled, scale, 2.0, None)[1])

    def _keep_norm(self, norm: Tensor | float) -> None:
        if isinstance(norm, Tensor):
            whole = _local(norm)
            if whole is None:
                return
            # A copy: the tensor is the user's, who may write to it.
            norm = whole.detach().reshape(()).to(torch.float32, copy=True)
        self._seen_norms.append(norm)

    def _take_scale(self, scale: Tensor) -> None:
        if is_capturing(scale.device):
            self._begun = None
            return
        # An update that raises after this has no row, and the next one takes its cells.
        self._begun = self._numbers.cells(scale.device)
        self._begun[0].fill_(scale)

    def _take_iteration(self, states: Collection[dict[str, Any]]) -> None:
        begun, self._begun = self._begun, None
        norms, self._seen_norms, self._given_norm = self._seen_norms, [], False
        if begun is None:
            return
        cells = self._numbers.cells(begun[0].device)
        if cells is not begun:
            # Somebody who was called by the scaler has read the rows in the midst of this one.
            cells[0].fill_(begun[0])
        found = _verdict(states, cells[0].device)
        if isinstance(found, Tensor):
            cells[1].fill_(found)
        if norms:
            _write_largest(norms, cells[2])
        self._numbers.commit()
        skipped = None if isinstance(found, Tensor) else found
        self._unread.append(_Note(self._next, skipped, bool(norms)))
        self._next += 1

    def _read(self) -> None:
        if not self._unread:
            return
        notes = list(self._unread)
        numbers = self._numbers.read()
        self._unread.clear()
        # Rows are dropped there in blocks, and here one by one.
        self._rows.extend(note.row(row) for note, row in zip(notes, numbers[-len(notes) :], strict=True))


def _verdict(states: Collection[dict[str, Any]], device: torch.device) -> bool | Tensor:
    """Say whether anything was not finite: what the host knows, or else a number on the device, not 0 if so."""
    flags: list[Tensor] = []
    for state in states:
        # One of several losses may have been finite whose step was left out for another.
        known = state.get("not_made", state.get("skipped"))
        if known or state.get("gave_up"):
            return True
        if known is None:
            flags += [*state["found_inf_per_device"].values(), *state.get("others", ())]
        if "gave_up" not in state:
            flags += state.get("given_up", ())
    return add_up(flags, device).reshape(()) if flags else False


def _write_largest(norms: list[Tensor | float], cell: Tensor) -> None:
    # Without waiting, unless it goes to the CPU: there nobody would know when it has arrived.
    ahead = cell.device.type != "cpu"
    there = [
        norm.to(cell.device, non_blocking=ahead)
        if isinstance(norm, Tensor)
        else torch.full((), norm, device=cell.device)
        for norm in norms
    ]
    cell.fill_(there[0] if len(there) == 1 else torch.stack(there).amax())


def _local(norm: Tensor) -> Tensor | None:
    """Give the whole norm; None of a DTensor that is not whole on this rank, since adding it up takes all ranks."""
    if norm.numel() != 1:
        msg = f"note_norm takes a tensor of one element; got one of shape {tuple(norm.shape)}."
        raise OptionError(msg)
    placements = getattr(norm, "placements", None)
    if placements is None:
        return norm
    whole = all(placement.is_replicate() for placement in placements)
    return norm.to_local() if whole else None  # type: ignore[attr-defined]
