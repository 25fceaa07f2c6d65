"""Where a forward pass leaves the float32 run that was carried beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mezzo.report.findings import Finding
from mezzo.torch.recording.recorded import RecordedOp

from .places import base_name, by_place, name_of, op_name, path_of, precision_line, where
from .recording import Recording

__all__ = ["far_from_float32"]

_FAR = 0.1
"""As a share of the float32 result; a sound pass in bfloat16 is some hundredths away."""
_NOTHING = 1e-5
"""Against the operands: what is left of a difference that is smaller is noise in float32 too."""
_CANCELS = ("add", "sub", "rsub", "sum", "mean")


def far_from_float32(recording: Recording) -> Iterator[Finding]:
    """Find the first op of each module whose result is far from float32, though what it works with is not.

    It needs the errors that ``explain(shadow=True)`` measures. It looks as far as the first step of an optimizer: weights
    that two runs have updated differ, and that is no op's fault.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"far from float32"`` for each place.
    """
    steps = (op.index for op in recording.ops if op.record.phase == "optimizer")
    end = next(steps, math.inf)
    first: dict[str, RecordedOp] = {}
    for op in recording.forward:
        if op.index < end and _error(op) > _FAR and not _is_noise(recording, op):
            first.setdefault(name_of(op.record), op)
    found = [op for op in first.values() if all(_error(maker) <= _FAR for maker in _makers(recording, op))]
    for group in by_place(found):
        worst = max(group, key=_error)
        record = worst.record
        before = max(map(_error, _makers(recording, worst)), default=0.0)
        message = (
            f"{op_name(record)}{where(group)} gives {record.gave[0]} that is far from the float32 result, "
            f"{_error(worst):.2g} times its size; what goes in is {before:.1g} away"
        )
        sizes = _sizes(recording, worst)
        if sizes and record.numbers is not None and base_name(record) in _CANCELS:
            result = record.numbers.max_abs
            message += f". Numbers of up to {max(sizes):.3g} give one of up to {result:.2g}: their digits cancel"
        advice = f"compute it in float32: {precision_line(group, 'fp32')}"
        yield Finding("far from float32", message, advice, record.source, path_of(group), len(group))


def _error(op: RecordedOp) -> float:
    """Give the error of a result; 0 where it was not measured, or where NaN or Inf leave none to speak of."""
    numbers = op.record.numbers
    known = numbers is not None and numbers.error is not None and math.isfinite(numbers.error)
    return float(numbers.error or 0) if known and numbers is not None else 0.0


def _makers(recording: Recording, op: RecordedOp) -> list[RecordedOp]:
    found = (recording.producer(op, operand) for operand in range(len(op.record.used)))
    return [maker for maker in found if maker is not None]


def _sizes(recording: Recording, op: RecordedOp) -> list[float]:
    return [maker.record.numbers.max_abs for maker in _makers(recording, op) if maker.record.numbers is not None]


def _is_noise(recording: Recording, op: RecordedOp) -> bool:
    """Say whether the float32 result is about 0 against the operands of a sum, so that no share of it means anything."""
    numbers = op.record.numbers
    if numbers is None or not (op.record.dot or base_name(op.record) in _CANCELS):
        return False
    reference = numbers.max_abs / max(_error(op), 1.0)
    return reference <= _NOTHING * max(_sizes(recording, op), default=0.0)
