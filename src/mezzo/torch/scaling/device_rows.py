"""Rows of a few numbers, written on the device where they are, and read by the host in one go when somebody asks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DeviceRows"]

_ROWS = 64
"""Rows of a block: one allocation for so many of them, and less than 1 KiB of memory."""

_COLUMNS = 3


@dataclass
class _Block:
    """Some rows.

    Attributes:
        numbers: Shape (rows, columns).
        filled: How many of the rows are complete.
    """

    numbers: Tensor
    filled: int = 0


class DeviceRows:
    """The last rows that were written, on one device or one after the other on several.

    A row is begun with `cells`, written to, and complete with `commit`: an op for each number, and no host read. Not for
    several threads at once.

    Args:
        keep: How many rows are kept at least; older ones are dropped, a block at a time.

    Example:
        >>> import torch
        >>> rows = DeviceRows(keep=100)
        >>> for number in (8.0, 4.0):
        ...     first, second, third = rows.cells(torch.device("cpu"))
        ...     _ = first.fill_(number)
        ...     rows.commit()
        >>> [row[0] for row in rows.read()]
        [8.0, 4.0]
        >>> rows.read()
        []
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._blocks: deque[_Block] = deque()
        # Of the last block. Made all at once, since indexing takes longer than writing.
        self._cells: list[tuple[Tensor, ...]] = []
        self._total = 0

    def cells(self, device: torch.device) -> tuple[Tensor, ...]:
        """Give the three numbers of the next row, float32, of no dimension; the same ones until `commit`.

        Args:
            device: Where they are to be.
        """
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.filled == _ROWS or block.numbers.device != device:
            block = self._add_block(device)
        return self._cells[block.filled]

    def commit(self) -> None:
        """Count the row that `cells` gave; what was not written of it is any number."""
        self._blocks[-1].filled += 1
        self._total += 1
        while self._total - self._blocks[0].filled >= self._keep:
            self._total -= self._blocks.popleft().filled

    def read(self) -> list[list[float]]:
        """Give the rows that are kept, and forget them: one host read, or one per change of the device.

        Returns:
            Lists of three numbers, the oldest row first.
        """
        rows: list[list[float]] = []
        same: list[Tensor] = []
        for block in self._blocks:
            if same and same[0].device != block.numbers.device:
                rows += torch.cat(same).tolist()
                same = []
            same.append(block.numbers.narrow(0, 0, block.filled))
        if same:
            rows += torch.cat(same).tolist()
        while len(self._blocks) > 1:
            self._blocks.popleft()
        if self._blocks:
            self._blocks[0].filled = 0  # to be written to again: who reads often should not pay for a block each time
        self._total = 0
        return rows

    def _add_block(self, device: torch.device) -> _Block:
        # A tensor that is made in inference mode cannot be written to after it.
        with torch.inference_mode(False), torch.no_grad():
            block = _Block(torch.zeros(_ROWS, _COLUMNS, device=device))
            flat = block.numbers.view(-1).unbind()
        self._cells = list(zip(*[iter(flat)] * _COLUMNS, strict=True))
        self._blocks.append(block)
        return block
