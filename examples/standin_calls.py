"""What the stand-in accelerator writes down of its work, so that one can say in which dtype it computed an op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_COPY = torch.ops.aten.copy_.default
_INDEX = torch.ops.aten.index.Tensor


class Call(NamedTuple):
    """One op that the device ran."""

    op: str
    """Name without overload, such as ``"mm"``."""
    inputs: tuple[torch.dtype, ...]
    """Dtypes of the tensors that came in, in order."""
    output: torch.dtype | None
    """Dtype of the (first) tensor that came out; None if none did."""
    host_read: bool
    """Whether the host waited for numbers of the device: ``item()``, a copy to the CPU that is not ``non_blocking``, ..."""


_recorders: list[list[Call]] = []


@contextmanager
def calls() -> Iterator[list[Call]]:
    """Record what the device runs, in any thread, until the block ends.

    Yields:
        A list that grows by one `Call` for each op, in order; those of a backward pass too.

    Examples:
        >>> with calls() as ran:
        ...     product = torch.ones(2, 2, device="standin") @ torch.ones(2, 2, device="standin")
        >>> [(call.op, call.output) for call in ran if call.op == "mm"]
        [('mm', torch.float32)]
    """
    mine: list[Call] = []
    _recorders.append(mine)
    try:
        yield mine
    finally:
        _recorders[:] = [one for one in _recorders if one is not mine]


def note(func: Any, leaves: list[Any], *, stays: bool, out: Any) -> None:
    """Write down an op, if anybody records.

    Args:
        func: The op.
        leaves: Its arguments, those in lists too.
        stays: Whether what it makes is on the device.
        out: What it made.
    """
    if not _recorders:
        return
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    dtypes = tuple(one.dtype for one in inputs)
    made = next((leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), None)
    to_cpu = not stays or (func is _COPY and inputs[0].device.type == "cpu")
    non_blocking = any(leaf is True for leaf in leaves)  # the only flag that a copy has
    waits = not non_blocking if to_cpu else _waits(func, dtypes)
    call = Call(func.name().removeprefix("aten::").partition(".")[0], dtypes, made, waits)
    for recorder in tuple(_recorders):
        recorder.append(call)


def _waits(func: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Say whether the host needs a number to go on; to index by numbers it does not, to index by a mask it does."""
    if func is _INDEX:
        return torch.bool in dtypes[1:]
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
