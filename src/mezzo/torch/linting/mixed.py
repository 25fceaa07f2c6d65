"""Mixtures of dtypes that cost something: float32 that an op without a rule makes, and that is rounded again in the end."""

from __future__ import annotations

from collections.abc import Iterator

from mezzo.report.findings import Finding, in_bytes
from mezzo.report.records import itemsize
from mezzo.torch.recording.recorded import RecordedOp

from .places import base_name, by_place, listed, op_name, path_of, where
from .recording import LOW, Recording, is_float

__all__ = ["mixed_dtypes"]

_SHARE = 0.01
"""Of the bytes that the forward pass writes: what is less is not worth a line."""
_STEPS = 16
"""How far a way through the ops is followed: a chain of activation, dropout and reshapes is shorter."""

_Chain = tuple[list[RecordedOp], list[RecordedOp]]
"""Ops that work on in float32 what a mixture gave, and those that cast it down in the end."""


def mixed_dtypes(recording: Recording) -> Iterator[Finding]:
    """Find ops without a rule that mix dtypes, so that ops behind them run in float32 until all of it is cast down again.

    Where float32 is used, by a norm or a reduction, where the result is given to the outside, and where the output of a
    layer is added to a float32 stream, there is no finding: those sums are meant to keep their digits.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"mixed dtypes"`` for each place that has at least 1% of the bytes of the forward pass.
    """
    total = sum(op.record.bytes_written for op in recording.forward)
    chains: dict[int, _Chain] = {}
    mixed: list[RecordedOp] = []
    for op in recording.forward:
        if _mixes(op) and not _adds_to_a_stream(recording, op) and (chain := _chain(recording, op)):
            mixed.append(op)
            chains[id(op)] = chain
    for group in by_place(mixed):
        between = [one for op in group for one in chains[id(op)][0]]
        wide = sum(op.record.bytes_written for op in (*group, *between))
        if wide >= _SHARE * total:
            yield _finding(group, between, [one for op in group for one in chains[id(op)][1]], wide)


def _finding(group: list[RecordedOp], between: list[RecordedOp], ends: list[RecordedOp], wide: int) -> Finding:
    record = group[0].record
    came = " and ".join(dict.fromkeys(dtype for dtype in record.used if is_float(dtype)))
    low = next(dtype for dtype in ends[0].record.used if dtype in LOW)
    message = (
        f"{op_name(record)}{where(group)} mixes {came}, has no rule in the policy, and gives float32; "
        f"{listed(op_name(op.record) for op in between)} run in float32 too ({in_bytes(wide)} with it), and then "
        f"{listed(op_name(op.record) for op in ends)}{where(ends)} casts it to {low}"
    )
    advice = (
        f"round the result of {op_name(record)}, right behind it: .to(torch.{low}); what it adds up or multiplies keeps its "
        "digits, and what follows has half the bytes"
    )
    return Finding("mixed dtypes", message, advice, record.source, path_of(group), len(group))


def _mixes(op: RecordedOp) -> bool:
    record = op.record
    if record.rule != "not listed" or record.gave[:1] != ("float32",):
        return False
    # An operand of no dimension does not take part in the choice of the dtype.
    dtypes = {dtype for dtype, shape in zip(record.used, record.shapes_in, strict=True) if is_float(dtype) and shape}
    return len(dtypes) > 1 and min(map(itemsize, dtypes)) < itemsize("float32")


def _adds_to_a_stream(recording: Recording, op: RecordedOp) -> bool:
    """Say whether this is a residual connection: the low output of a layer added to float32 of the same shape."""
    record = op.record
    if base_name(record) != "add":
        return False
    pairs = [*enumerate(zip(record.used, record.shapes_in, strict=True))]
    wide = any(dtype == "float32" and shape == record.shapes_out[0] for _, (dtype, shape) in pairs)
    return wide and any(_from_a_product(recording, op, operand) for operand, (dtype, _) in pairs if dtype in LOW)


def _from_a_product(recording: Recording, op: RecordedOp, operand: int) -> bool:
    maker = recording.producer(op, operand)
    for _ in range(_STEPS):
        if maker is None or maker.record.dot:
            break
        maker = recording.producer(maker, 0)
    return maker is not None and maker.record.dot


def _chain(recording: Recording, op: RecordedOp) -> _Chain | None:
    """Follow a float32 result through ops without a rule to listed ones that cast it down.

    Returns:
        None if something uses float32 as it is, or nothing runs in between: then no bytes are to be saved.
    """
    between: list[RecordedOp] = []
    ends: list[RecordedOp] = []
    waiting = [op]
    while waiting:
        maker = waiting.pop()
        readers = [(one, at) for one, at in recording.readers(maker) if one.record.phase == "forward"]
        if not readers or len(between) > _STEPS:
            return None
        for reader, operand in readers:
            if any(cast.operand == operand and cast.used in LOW for cast in reader.record.casts):
                ends.append(reader)
            elif not _passes_on(reader, maker):
                return None
            elif all(reader is not one for one in between):
                between.append(reader)
                waiting.append(reader)
    return (between, ends) if between and ends else None


def _passes_on(reader: RecordedOp, maker: RecordedOp) -> bool:
    """Say whether an op without a rule makes as many numbers in float32; one that sums them up has a use for the digits."""
    record = reader.record
    plain = record.rule == "not listed" and record.gave == ("float32",) and not _mixes(reader)
    return plain and record.bytes_written >= maker.record.bytes_written
