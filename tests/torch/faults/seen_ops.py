"""What a block does on the device, seen by a dispatch mode: host reads, and dtypes that are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# What makes the host wait for a value: `item()`, `bool()`, `tolist()`, `equal`, `nonzero`.
READS = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero", "aten.item")


class Watch(TorchDispatchMode):
    """Keeps the names of the ops that were called, and the dtypes of what they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.names.append(str(func.overloadpacket))
        self.dtypes |= {leaf.dtype for leaf in _pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Give a list that holds, once the block is left, the ops that made the host wait."""
    reads: list[str] = []
    with Watch() as watch:
        yield reads
    reads += [name for name in watch.names if name in READS]


@contextmanager
def dtypes_made() -> Iterator[set[torch.dtype]]:
    """Give a set that holds, once the block is left, the dtypes of all tensors that were made."""
    dtypes: set[torch.dtype] = set()
    with Watch() as watch:
        yield dtypes
    dtypes |= watch.dtypes
