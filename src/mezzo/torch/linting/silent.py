"""What goes wrong without NaN or Inf: gradients that a cast makes 0, and float32 out of an op that nobody gave a rule."""

from __future__ import annotations

from collections.abc import Iterator

from mezzo.report.findings import Finding, in_bytes
from mezzo.report.numbers import Numbers
from mezzo.torch.recording.recorded import RecordedOp

from .constants import smallest
from .places import by_place, listed, op_name, path_of, where
from .recording import LOW, Recording, is_float, result_bytes

__all__ = ["float32_without_rule", "gradients_underflow"]

_SHARE = 0.01
"""Of the bytes that the forward pass writes: what is less is not worth a line."""

_LOST = 0.05
"""Of a gradient's numbers: fewer are lost in any float16 training, and are no harm."""

_NOT_SCALED = (
    "scale the loss: scaler = mezzo.torch.GradScaler(device); scaler.scale(loss).backward(); scaler.step(optimizer); "
    "scaler.update(); or bfloat16, which goes down to 1e-38"
)
_SCALED = "a larger scale: GradScaler(init_scale=...), or growth_interval=...; or bfloat16, which goes down to 1e-38"


def gradients_underflow(recording: Recording) -> Iterator[Finding]:
    """Find casts of the backward pass that make gradients 0. It needs the numbers of the ops.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"gradients underflow"`` for each place.
    """
    lost: dict[int, tuple[Numbers, float]] = {}
    ops: list[RecordedOp] = []
    for op in recording.ops:
        maker = recording.producer(op, 0)
        numbers = maker.record.numbers if maker is not None else None
        if numbers is None or not _casts_a_gradient(op):
            continue
        share = numbers.losses[op.record.gave[0]].underflow
        if share >= _LOST:
            ops.append(op)
            lost[op.index] = (numbers, share)
    advice = _SCALED if any("scale" in op.callers for op in recording.ops) else _NOT_SCALED
    for group in by_place(ops):
        numbers, share = max((lost[op.index] for op in group), key=lambda pair: pair[1])
        record = group[0].record
        low = record.gave[0]
        message = (
            f"{share:.0%} of the gradients that come to {low}{where(group)}, from {numbers.min_abs:.1g} to "
            f"{numbers.max_abs:.1g}, become 0 in the cast: the smallest number of {low} is {smallest(low):.0e}. What they "
            "are for does not learn"
        )
        yield Finding("gradients underflow", message, advice, record.source, path_of(group), len(group))


def _casts_a_gradient(op: RecordedOp) -> bool:
    record = op.record
    return (
        record.phase == "backward" and record.rule == "cast" and record.used == ("float32",) and record.gave[0] in LOW
    )


def float32_without_rule(recording: Recording) -> Iterator[Finding]:
    """Find ops without a rule that take low operands and give float32 all the same, as custom ops do.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"float32 memory"`` for each place that has at least 1% of the bytes of the forward pass.
    """
    ops = recording.forward
    total = sum(op.record.bytes_written for op in ops)
    for group in by_place(op for op in ops if _widens(op) and not _is_rounded(recording, op)):
        wide = sum(result_bytes(op.record, "float32") for op in group)
        if wide < _SHARE * total:
            continue
        record = group[0].record
        low = _low_of(record.used)
        after = listed(op_name(one.record) for op in group for one in _readers(recording, op))
        message = (
            f"{op_name(record)}{where(group)} takes {low} and gives float32, and has no rule in the policy: "
            f"{in_bytes(wide)} of the {in_bytes(total)} that the forward pass writes, half of it in {low}"
        )
        if after:
            message += f"; {after} take it"
        advice = f"round its result where it is made: .to(torch.{low})"
        yield Finding("float32 memory", message, advice, record.source, path_of(group), len(group))


def _widens(op: RecordedOp) -> bool:
    record = op.record
    if record.rule != "not listed" or not op.autocast or record.gave[:1] != ("float32",):
        return False
    pairs = zip(record.used, record.shapes_in, strict=True)
    dtypes = {dtype for dtype, shape in pairs if is_float(dtype) and shape}
    return bool(dtypes) and dtypes <= set(LOW)


def _readers(recording: Recording, op: RecordedOp) -> list[RecordedOp]:
    return [reader for reader, _ in recording.readers(op) if reader.record.phase == "forward"]


def _is_rounded(recording: Recording, op: RecordedOp) -> bool:
    """Say whether the program itself casts the result down at once, so that nothing else keeps it."""
    readers = _readers(recording, op)
    return bool(readers) and all(one.record.rule == "cast" and one.record.gave[0] in LOW for one in readers)


def _low_of(dtypes: tuple[str, ...]) -> str:
    return next(dtype for dtype in dtypes if dtype in LOW)
