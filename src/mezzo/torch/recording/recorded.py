"""`RecordedOp`: one op as it was seen, with what a rule that looks for faults has to know beside the record."""

from __future__ import annotations

from dataclasses import dataclass

from mezzo.report.records import OpRecord

__all__ = ["RecordedOp"]


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One op as it was seen. It holds no tensors.

    Attributes:
        record: What the report says of it.
        index: Its place in time.
        producers: For each operand of the record the index of the op that it is the result of, or a view of the result;
            -1 if that is not known.
        parameters: For each operand the parameter or buffer that it is, or is a view of, by its name; None if it is none.
        scalars: The Python numbers among its arguments, in order, such as the value that a mask is filled with.
        autocast: The dtype of the region it ran in; None if autocast was off.
        callers: Functions of PyTorch's and of mezzo's that were between it and the user's line, such as
            ``"clip_grad_norm_"``, ``"unscale_"`` and ``"scale"``, and ``"cross_entropy"``.
        seen_as: What really ran, ``"aten::addmm"`` for a record of ``"aten::linear"``; the last of them if there were
            several.
        is_leaf: For each operand whether it is a leaf that no op has made: an input, or a parameter.
        device: The type of the device it ran on.
    """

    record: OpRecord
    index: int
    producers: tuple[int, ...] = ()
    parameters: tuple[str | None, ...] = ()
    scalars: tuple[float | int | bool, ...] = ()
    autocast: str | None = None
    callers: frozenset[str] = frozenset()
    seen_as: str = ""
    is_leaf: tuple[bool, ...] = ()
    device: str = ""
