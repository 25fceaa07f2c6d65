"""Where the numbers of a float32 run lie: for each storage one flat tensor, with an element for each of its elements.

Views and writes in place need nothing then: the shadow of a tensor is the same window over the flat tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

__all__ = ["Memory", "is_float", "wide"]

_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def _part(dtype: torch.dtype) -> torch.dtype:
    """Say in what dtype the numbers of a tensor lie in memory: of complex ones, real and imaginary part alternate."""
    return _PARTS.get(dtype, dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Say what dtype a float32 run has for a floating-point or complex one: itself if it has as many digits.

    Example:
        >>> wide(torch.float16), wide(torch.float64), wide(torch.complex32)
        (torch.float32, torch.float64, torch.complex64)
    """
    part = _part(dtype)
    real = part if part in (torch.float32, torch.float64) else torch.float32
    return real.to_complex() if dtype.is_complex else real


def is_float(tensor: Tensor) -> bool:
    """Say whether a tensor has floating-point or complex numbers."""
    return _part(tensor.dtype).is_floating_point


@dataclass(frozen=True)
class _Flat:
    part: torch.dtype
    numbers: Tensor

    def window(self, tensor: Tensor) -> Tensor | None:
        """Give what lies where a tensor of that storage lies; None if that is not to be told."""
        if _part(tensor.dtype) is not self.part:
            return None  # the bits are read as something else
        if tensor.untyped_storage().nbytes() != self.numbers.numel() * self.part.itemsize:
            return None  # resized
        numbers = torch.view_as_complex(self.numbers.view(-1, 2)) if tensor.dtype.is_complex else self.numbers
        return numbers.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class Memory:
    """The shadows of storages. Each is freed with its storage, and keeps none alive.

    All tensors given to it have storages (`mezzo.torch.recording.numerics.has_storage`).
    """

    def __init__(self) -> None:
        # PyTorch gives the same object for a storage as long as it lives, and drops it with it.
        self._flats: WeakKeyDictionary[Any, _Flat] = WeakKeyDictionary()

    def __len__(self) -> int:
        """Count the storages that have a shadow."""
        return len(self._flats)

    def __contains__(self, tensor: Tensor) -> bool:
        """Say whether the storage of a tensor has a shadow."""
        return tensor.untyped_storage() in self._flats

    @property
    def nbytes(self) -> int:
        """The memory that the shadows take."""
        return sum(flat.numbers.nbytes for flat in [*self._flats.values()])

    def window(self, tensor: Tensor) -> Tensor | None:
        """Give the shadow of a tensor, to read and to write; None if it is its own shadow."""
        flat = self._flats.get(tensor.untyped_storage())
        found = flat.window(tensor) if flat else None
        if flat and found is None:
            self.drop(tensor)
        return found

    def begin(self, tensor: Tensor) -> Tensor:
        """Give a storage a shadow that is equal to it, and of that the tensor's window."""
        part, storage = _part(tensor.dtype), tensor.untyped_storage()
        real = torch.empty(0, dtype=part, device=tensor.device).set_(storage)
        flat = self._flats[storage] = _Flat(part, real.to(wide(part), copy=True))
        window = flat.window(tensor)
        assert window is not None, "a tensor of elements that its storage holds no whole number of"
        return window

    def keep(self, tensor: Tensor, shadow: Tensor) -> None:
        """Give a new storage the shadow that an op gave for a tensor in it.

        Args:
            tensor: The result of the real run.
            shadow: That of the float32 run, of the same shape. Its memory is used where that is possible.
        """
        storage = tensor.untyped_storage()
        numbers = _own_memory(tensor, shadow, storage.nbytes() // tensor.dtype.itemsize)
        if numbers is None:
            self.begin(tensor).copy_(shadow)
        else:
            flat = torch.view_as_real(numbers).view(-1) if numbers.is_complex() else numbers
            self._flats[storage] = _Flat(_part(tensor.dtype), flat)

    def drop(self, tensor: Tensor) -> None:
        """Let the storage of a tensor be its own shadow again."""
        self._flats.pop(tensor.untyped_storage(), None)


def _own_memory(real: Tensor, shadow: Tensor, elements: int) -> Tensor | None:
    """Give a shadow's own memory as a flat tensor, if nobody else has it and it is laid out as the real tensor's."""
    fits = (
        shadow.dtype is wide(real.dtype)
        and shadow.stride() == real.stride()
        and shadow.storage_offset() == real.storage_offset() == 0
        and shadow.untyped_storage().nbytes() == elements * shadow.dtype.itemsize
    )
    # Two: its tensor, and the call that asks. An op may give a part of what it took, or several parts of one result.
    if not fits or torch._C._storage_Use_Count(shadow.untyped_storage()._cdata) > 2:
        return None
    return shadow.as_strided((elements,), (1,), 0)
