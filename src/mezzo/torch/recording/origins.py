"""Which op a tensor comes from, by where its memory is; no tensor is kept for it.

Views share memory, so that they need no care. Memory that is freed is given to others by an op that is seen, which then
takes the old entry's place.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .memory_places import address_of

__all__ = ["Origin", "Origins"]


class Origin(NamedTuple):
    """What made a tensor's numbers.

    Attributes:
        place: The op's place in time.
        cast_from: If the op was a cast: the origin of what was cast, or -1; else None.
        address: If it was a cast: where what was cast is.
    """

    place: int
    cast_from: int | None = None
    address: int = 0


class Origins:
    """Origins by address."""

    def __init__(self) -> None:
        self._by_address: dict[int, Origin] = {}

    def of(self, tensor: Tensor) -> Origin | None:
        """Give a tensor's origin; None if no op that was seen made it."""
        return self._by_address.get(address_of(tensor))

    def at(self, address: int) -> Origin | None:
        """Give the origin of what is at an address."""
        return self._by_address.get(address)

    def set(self, tensor: Tensor, origin: Origin) -> None:
        """Say that an op has just made a tensor, or written into it."""
        if address := address_of(tensor):
            self._by_address[address] = origin
