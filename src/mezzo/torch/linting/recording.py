"""What was recorded, as the rules that look for faults go through it: by index, with ways from an operand to its origin."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from mezzo.report.records import Cast, OpRecord, itemsize
from mezzo.torch.recording.recorded import RecordedOp

__all__ = ["LOW", "Recording", "casts_of", "device_of", "is_float", "low_result", "result_bytes"]

LOW = ("float16", "bfloat16")

_COPIES = frozenset(("aten::clone", "aten::contiguous", "aten::lift_fresh", "aten::lift_fresh_copy"))

_AROUND = frozenset(("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "scale"))
"""Functions of the training loop that are neither forward nor backward pass."""


class Recording:
    """Recorded ops in the order of time.

    Attributes:
        ops: The ops.
        mastered: The names of parameters that have a float32 master, so that they may be low.
    """

    def __init__(self, ops: Sequence[RecordedOp], mastered: frozenset[str] = frozenset()) -> None:
        self.ops = ops
        self.mastered = mastered

    @cached_property
    def forward(self) -> list[RecordedOp]:
        """The ops of the forward pass, what an optimizer, a scaler or clipping calls left out."""
        return [op for op in self.ops if op.record.phase == "forward" and _AROUND.isdisjoint(op.callers)]

    @cached_property
    def _by_index(self) -> dict[int, RecordedOp]:
        return {op.index: op for op in self.ops}

    @cached_property
    def _readers(self) -> dict[int, list[tuple[RecordedOp, int]]]:
        found: dict[int, list[tuple[RecordedOp, int]]] = {}
        for op in self.ops:
            for operand, index in enumerate(op.producers):
                found.setdefault(index, []).append((op, operand))
        return found

    def producer(self, op: RecordedOp, operand: int) -> RecordedOp | None:
        """Find the op that an operand is the result of, through copies; None if that is not known."""
        index = op.producers[operand] if operand < len(op.producers) else -1
        found = self._by_index.get(index)
        while found is not None and found.record.op in _COPIES and found.producers:
            index = found.producers[0]
            found = self._by_index.get(index)
        return found

    def readers(self, op: RecordedOp) -> Iterator[tuple[RecordedOp, int]]:
        """Go through the ops that take the result of an op, through copies, and say as which operand."""
        for reader, operand in self._readers.get(op.index, ()):
            if reader.record.op in _COPIES:
                yield from self.readers(reader)
            else:
                yield reader, operand


def casts_of(record: OpRecord) -> tuple[Cast, ...]:
    """Give the casts in front of an op, or the one that it is."""
    if record.rule != "cast":
        return record.casts
    if not record.came or not record.gave:
        return ()
    shape = record.shapes_in[0]
    return (Cast(0, record.came[0], record.gave[0], math.prod(size for size in shape if isinstance(size, int))),)


def device_of(op: RecordedOp) -> str:
    """Give the type of the device that an op ran on; empty if it is not known."""
    return str(getattr(op, "device", ""))


def is_float(dtype: str) -> bool:
    """Say whether a dtype is a real floating one."""
    return dtype.startswith(("float", "bfloat"))


def low_result(record: OpRecord) -> str:
    """Give the lower precision in which an op computed; empty if it did in another.

    What it gave decides; for an op that gives nothing, as those that change a list of tensors, what it used.
    """
    dtypes = record.gave or record.used
    return dtypes[0] if dtypes and dtypes[0] in LOW else ""


def result_bytes(record: OpRecord, dtype: str) -> int:
    """Give the bytes of an op's results of a dtype, those of no dimension left out."""
    shapes = [shape for given, shape in zip(record.gave, record.shapes_out, strict=True) if given == dtype and shape]
    return sum(math.ceil(itemsize(dtype) * math.prod(size for size in one if isinstance(size, int))) for one in shapes)
