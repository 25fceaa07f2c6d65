"""Constants that float16 does not hold: the -1e9 of masks, and large factors."""

from __future__ import annotations

from collections.abc import Iterator

from mezzo.report.findings import Finding
from mezzo.torch.recording.recorded import RecordedOp

from .constants import becomes_infinite, largest
from .places import base_name, by_place, op_name, path_of, where
from .recording import Recording, casts_of, low_result

__all__ = ["overflowing_constants"]

_FILLS = ("masked_fill", "where", "full", "full_like", "fill", "scalar_tensor", "new_full", "constant_pad_nd")
_MASKS = ("masked_fill", "where", "sub", "rsub")
_OPS = (*_FILLS, "mul", "add", "sub", "rsub")
_STEPS = 32
"""How many ops behind a constant are looked at for a softmax."""


def overflowing_constants(recording: Recording) -> Iterator[Finding]:
    """Find finite numbers, such as the -1e9 of a mask, that are infinite in float16.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"mask overflow"``, or ``"constant overflow"`` where it is no mask, for each place and number.
    """
    ops, numbers = [], []
    for op in recording.forward:
        found = [one for one in op.scalars if becomes_infinite(one, "float16")]
        if found and base_name(op.record) in _OPS and _reaches_float16(recording, op):
            ops.append(op)
            numbers.append(found[0])
    number_of = {id(op): number for op, number in zip(ops, numbers, strict=True)}
    for group in by_place(ops, numbers):
        number = number_of[id(group[0])]
        softmax = any(_reaches_softmax(recording, op) for op in group)
        if number < 0 or softmax or base_name(group[0].record) in _MASKS:
            yield _mask(group, number, softmax=softmax)
        else:
            yield _factor(group, number)


def _mask(group: list[RecordedOp], number: float, *, softmax: bool) -> Finding:
    record = group[0].record
    message = (
        f"{op_name(record)}{where(group)} has the constant {number:g}, which is {'-' if number < 0 else ''}inf in "
        f"float16: its largest number is {largest('float16'):g}"
    )
    if softmax:
        message += ". A row of which all is masked becomes NaN in softmax"
    advice = "fill with torch.finfo(x.dtype).min, x being what is masked"
    return Finding("mask overflow", message, advice, record.source, path_of(group), len(group))


def _factor(group: list[RecordedOp], number: float) -> Finding:
    record = group[0].record
    top = largest("float16")
    # Kernels have a number of Python's in float32: a product overflows where it is too large, and no sooner.
    what = (
        f"what is larger than {top / number:.2g} becomes inf"
        if base_name(record) == "mul"
        else "the result becomes inf"
    )
    message = (
        f"{op_name(record)}{where(group)} has the constant {number:g} and gives float16, whose largest number is {top:g}: "
        f"{what}"
    )
    advice = "a smaller constant; float32 for this op only moves the overflow to the next cast"
    return Finding("constant overflow", message, advice, record.source, path_of(group), len(group))


def _reaches_softmax(recording: Recording, op: RecordedOp) -> bool:
    waiting, seen = [op], {op.index}
    while waiting and len(seen) < _STEPS:
        for reader, _ in recording.readers(waiting.pop(0)):
            if any(word in op_name(reader.record) for word in ("softmax", "attention")):
                return True
            # Behind a product or a backward pass it is no mask any more.
            if reader.index not in seen and reader.record.phase == "forward" and not reader.record.dot:
                seen.add(reader.index)
                waiting.append(reader)
    return False


def _reaches_float16(recording: Recording, op: RecordedOp) -> bool:
    if low_result(op.record) == "float16":
        return True
    if base_name(op.record) not in (*_FILLS, "mul"):
        return False
    return any(
        cast.operand == operand and cast.used == "float16"
        for reader, operand in recording.readers(op)
        for cast in casts_of(reader.record)
    )
