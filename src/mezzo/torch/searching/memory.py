"""What is known of the memory that a search has seen: where numbers are not finite, and where none were written yet."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mezzo.torch.recording.memory_places import address_of, covers_its_memory

__all__ = ["KnownMemory"]


class KnownMemory:
    """Storages that have, or may have, numbers that are not finite; none is kept alive, and none is taken for another."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def note(self, tensor: Tensor) -> None:
        """Take down that a tensor has some, or that nothing was written into it yet."""
        if address := address_of(tensor):
            self._known[address] = StorageWeakRef(tensor.untyped_storage())

    def has(self, tensor: Tensor) -> bool:
        """Say whether that was taken down of a tensor's storage, and it is still that one."""
        known = self._known.get(address_of(tensor))
        return known is not None and known.cdata == tensor.untyped_storage()._cdata and not known.expired()

    def is_finite_now(self, tensor: Tensor) -> None:
        """Take down that all numbers of a tensor are finite now; of a part of a storage that says little."""
        if self._known and covers_its_memory(tensor):
            self._known.pop(address_of(tensor), None)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
