"""Counts how often the host waits for a device: reads of values, and copies that block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# `item`, `bool`, `float`, `if tensor:` and a tensor as an index all end in the first of these.
READING_OPS = {
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.item,
    aten.equal,
    aten.allclose,
    aten.nonzero,
    aten.nonzero_numpy,
    aten.masked_select,
    aten.unique_consecutive,
    aten._unique2,
}
COPYING_OPS = {aten._to_copy, aten.copy_}

# These read without such an op. On the CPU there is nothing to wait for, and the dispatcher sees nothing of them either.
READING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu}


class _Dispatched(TorchDispatchMode):
    """Counts below autograd; answers a read of a fake tensor, which has no value, with zero."""

    def __init__(self, reads: list[str], *, answer: bool) -> None:
        super().__init__()
        self.reads, self.answer = reads, answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in READING_OPS or _has_mask(packet, args):
            self.reads.append(str(func))
            if self.answer and packet is aten._local_scalar_dense:
                return 0.0
        result = func(*args, **(kwargs or {}))
        if packet in COPYING_OPS and _blocks(func, args, kwargs or {}, result):
            self.reads.append(str(func))
        return result


class _Called(TorchFunctionMode):
    """Counts the methods that read a device without such an op."""

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING_METHODS and args[0].device.type != "cpu":
            self.reads.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _has_mask(packet: Any, args: Any) -> bool:
    """Whether an index is a mask: the shape of the result has to be read."""
    return packet is aten.index and any(one is not None and one.dtype is torch.bool for one in args[1])


def _blocks(func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> bool:
    """Whether a copy makes the host wait: one to it or from it that was not told to go ahead."""
    source = args[1] if func.overloadpacket is aten.copy_ else args[0]
    if source.device.type == result.device.type:
        return False
    return not kwargs.get("non_blocking", len(args) > 2 and args[2])


@contextmanager
def counted_reads(*, answer: bool = False) -> Iterator[list[str]]:
    """Count the reads of a block.

    Args:
        answer: Whether a read of a number is answered with 0.0, for fake tensors, whose `tolist` reads one by one.

    Yields:
        The names of the ops and methods that read, in order; one entry a read.
    """
    reads: list[str] = []
    with _Called(reads), _Dispatched(reads, answer=answer):
        yield reads
