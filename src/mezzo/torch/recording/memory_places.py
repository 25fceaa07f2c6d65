"""Where the numbers of a tensor are in memory, as two numbers that hold no tensor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["NO_PLACE", "MemoryPlace", "address_of", "covers_its_memory", "place_of"]

MemoryPlace = tuple[int, int]
"""Where the storage begins, and where the tensor's first element is."""

NO_PLACE: MemoryPlace = (0, 0)


def place_of(tensor: Tensor) -> MemoryPlace:
    """Say where a tensor is; zeros if it has no memory of its own."""
    try:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage().data_ptr(), tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # fake, sparse, batched, a wrapper of others
        return NO_PLACE


def address_of(tensor: Tensor) -> int:
    """Say where its storage begins; 0 if it has none of its own."""
    return place_of(tensor)[0]


def covers_its_memory(tensor: Tensor) -> bool:
    """Say whether a tensor has all of its storage."""
    try:
        with torch._C.DisableTorchFunction():
            return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return False
