"""Casts that need not have been made: there and back, and the same tensor over and over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mezzo.report.findings import Finding, in_bytes
from mezzo.report.records import Cast, itemsize
from mezzo.torch.recording.recorded import RecordedOp

from .places import by_place, listed, op_name, path_of, where
from .recording import LOW, Recording, casts_of

__all__ = ["activations_cast_again", "redundant_casts", "weights_cast_again"]

_KEEP = "put it in `with mezzo.torch.keep_casts():`"


class _Again(NamedTuple):
    """A cast that was made before."""

    op: RecordedOp
    cast: Cast
    name: str
    why: str


def redundant_casts(recording: Recording) -> Iterator[Finding]:
    """Find casts up that every reader of the result undoes with a cast down.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"redundant casts"`` for each place.
    """
    undone: list[RecordedOp] = []
    readers: list[list[tuple[RecordedOp, Cast]]] = []
    for op in recording.forward:
        record = op.record
        if record.rule == "cast" and record.came and record.came[0] in LOW and record.gave == ("float32",):
            found = [(one, _cast_down(one, operand, record.came[0])) for one, operand in recording.readers(op)]
            taken = [(one, cast) for one, cast in found if cast is not None]
            if taken and len(taken) == len(found):
                undone.append(op)
                readers.append(taken)
    place_of = {id(op): place for place, op in enumerate(undone)}
    for group in by_place(undone):
        taken = [one for op in group for one in readers[place_of[id(op)]]]
        yield _redundant(group, taken)


def _cast_down(op: RecordedOp, operand: int, dtype: str) -> Cast | None:
    return next((cast for cast in casts_of(op.record) if cast.operand == operand and cast.used == dtype), None)


def _redundant(group: list[RecordedOp], taken: list[tuple[RecordedOp, Cast]]) -> Finding:
    record = group[0].record
    casts = [cast for op in group for cast in casts_of(op.record)] + [cast for _, cast in taken]
    moved = in_bytes(sum(cast.bytes_read + cast.bytes_written for cast in casts))
    ops = [op for op, _ in taken]
    back = "another cast" if ops[0].record.rule == "cast" else op_name(ops[0].record)
    message = (
        f"{record.came[0]} is cast to float32{where(group)} and back to {record.came[0]} by {back}{where(ops)}, and nothing "
        f"reads it in between: {len(casts)} casts that move {moved}"
    )
    place = f" at {record.source.place}" if record.source else ""
    advice = f"leave the cast to float32{place} away; the result is the same"
    return Finding("redundant casts", message, advice, record.source, path_of(group), len(group))


def weights_cast_again(recording: Recording) -> Iterator[Finding]:
    """Find weights that are cast more than once between two optimizer steps.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"weight cast again"`` for each reason, with the names, how often, and the bytes.
    """
    reasons: dict[str, list[_Again]] = {}
    for again in _weight_casts(recording):
        reasons.setdefault(again.why, []).append(again)
    for why, found in reasons.items():
        names = listed(dict.fromkeys(again.name for again in found))
        times = "once" if len(found) == 1 else f"{len(found)} times"
        read = in_bytes(sum(again.cast.bytes_read + again.cast.bytes_written for again in found))
        message = (
            f"{names}: cast to {found[0].cast.used} again {times} without a step of an optimizer in between, which moves "
            f"{read}: {_REASONS[why][0]}"
        )
        ops = [again.op for again in found]
        yield Finding(
            "weight cast again", message, _REASONS[why][1], found[0].op.record.source, path_of(ops), len(found)
        )


_REASONS = {
    "recomputation": (
        "activation checkpointing runs the forward pass again, when the region has ended and its casts are dropped",
        f"around the forward and the backward pass, {_KEEP}",
    ),
    "pass": (
        "each region drops its casts at its end, and another one ran the same line",
        f"around the loop over batches or micro-batches, {_KEEP}",
    ),
    "shared": (
        "several ops read it, and its cast was not kept: cache_enabled=False, or a view or frozen weight in torch.autocast",
        f"around the calls, {_KEEP}, and hand the weight itself to the ops and no view of it",
    ),
}


def _weight_casts(recording: Recording) -> Iterator[_Again]:
    seen: dict[tuple[str, str], set[tuple[object, ...]]] = {}
    for op in recording.ops:
        record = op.record
        if record.phase == "optimizer":
            seen.clear()
        if record.phase not in ("forward", "recomputation"):
            continue
        place = (record.op, record.source, record.path)
        for cast in casts_of(record):
            name = op.parameters[cast.operand] if cast.operand < len(op.parameters) else None
            if name is None or cast.used not in LOW:
                continue
            before = seen.setdefault((name, cast.used), set())
            if before:
                why = "pass" if place in before else "shared"
                yield _Again(op, cast, name, "recomputation" if record.phase == "recomputation" else why)
            before.add(place)


def activations_cast_again(recording: Recording) -> Iterator[Finding]:
    """Find results of an op that several ops cast to the same dtype, each for itself.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"activation cast again"`` for each place where such a result was made.
    """
    found: list[RecordedOp] = []
    casts: dict[int, list[tuple[RecordedOp, Cast]]] = {}
    for op in recording.forward:
        if not op.record.came:  # zeros and alike cost little to make again
            continue
        size = itemsize(op.record.gave[0]) if len(op.record.gave) == 1 else 0
        whole = op.record.bytes_written // size if size else 0
        # Casts of a part are of different parts, such as the batches of a data set.
        down = [one for one in _casts_by_readers(recording, op) if one[1].used in LOW and one[1].elements == whole]
        same = [one for one in down if one[1].elements == down[0][1].elements and one[1].used == down[0][1].used]
        readers = {id(one) for one, _ in same}
        if len(readers) > 1 and len(readers) == len(same):  # parts of it go to one op, as q, k and v do
            found.append(op)
            casts[id(op)] = same
    for group in by_place(found):
        again = [one for op in group for one in casts[id(op)][1:]]
        first = casts[id(group[0])]
        moved = in_bytes(sum(cast.bytes_read + cast.bytes_written for _, cast in again))
        record = group[0].record
        message = (
            f"the {first[0][1].came} result of {op_name(record)}{where(group)} is cast to {first[0][1].used} by "
            f"{len(first)} ops ({listed(op_name(op.record) for op, _ in first)}), each for itself; all but the first cast "
            f"move {moved}"
        )
        advice = f"cast it once, where it is made: .to(torch.{first[0][1].used})"
        yield Finding("activation cast again", message, advice, record.source, path_of(group), len(group))


def _casts_by_readers(recording: Recording, op: RecordedOp) -> Iterator[tuple[RecordedOp, Cast]]:
    for reader, operand in recording.readers(op):
        # Weights are told of as "weight cast again"; what made them is the code that initializes them.
        weight = operand < len(reader.parameters) and reader.parameters[operand] is not None
        if reader.record.phase == "forward" and reader.record.rule != "cast" and not weight:
            yield from ((reader, cast) for cast in reader.record.casts if cast.operand == operand)
