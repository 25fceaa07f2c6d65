"""Dtypes that cost something or that autocast was not made for: float32 in between, low weights and inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mezzo.report.findings import Finding, in_bytes
from mezzo.torch.recording.recorded import RecordedOp

from .hardware import slow_reason
from .places import by_place, listed, op_name, path_of, precision_line, where
from .recording import LOW, Recording, device_of, result_bytes

__all__ = ["float32_memory", "half_inputs", "half_models", "slow_dtypes"]

_FP32 = ("fp32", "fp32_set_opt_dtype", "fp32_append_dtype")
_SHARE = 0.01
"""Of the bytes that the forward pass writes: what is less is not worth a line."""


def float32_memory(recording: Recording) -> Iterator[Finding]:
    """Find ops that a rule of the policy brought from low operands to float32 results of a size that counts.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"float32 memory"`` for each place that has at least 1% of the bytes of the forward pass.
    """
    ops = recording.forward
    total = sum(op.record.bytes_written for op in ops)
    fallen = [op for op in ops if op.record.rule in _FP32 and _is_low(op) and result_bytes(op.record, "float32")]
    for group in by_place(fallen):
        wide = sum(result_bytes(op.record, "float32") for op in group)
        if wide < _SHARE * total:
            continue
        record = group[0].record
        low = next(dtype for dtype in record.came if dtype in LOW)
        message = (
            f"{op_name(record)}{where(group)} takes {low} and gives float32 by the policy's rule {record.rule}: "
            f"{in_bytes(wide)} of the {in_bytes(total)} that the forward pass writes, half of it in {low}"
        )
        advice = f"if {low} is precise enough for it: {precision_line(group, 'lower_precision_fp')}"
        yield Finding("float32 memory", message, advice, record.source, path_of(group), len(group))


def _is_low(op: RecordedOp) -> bool:
    return any(dtype in LOW and shape for dtype, shape in zip(op.record.came, op.record.shapes_in, strict=True))


def half_models(recording: Recording) -> Iterator[Finding]:
    """Find parameters that were stored in lower precision before autocast saw them, and have no master.

    Args:
        recording: The ops.

    Yields:
        One finding of the kind ``"half model under autocast"`` for each dtype.
    """
    for dtype in LOW:
        found: dict[str, RecordedOp] = {}
        for op in recording.forward:
            for name, came in zip(op.parameters, op.record.came, strict=False):
                if name is not None and came == dtype and op.autocast and op.record.rule != "cast":
                    found.setdefault(name, op)
        names = [name for name in found if name not in recording.mastered]
        if not names:
            continue
        message = (
            f"{listed(names)}: stored in {dtype} and used under autocast, which casts by itself where that is safe; updates "
            f"of the weights are rounded to {dtype}, and small ones are lost"
        )
        advice = (
            "model.float() and no .half() or .bfloat16(); or: model, optimizer = mezzo.torch.prepare(model, optimizer)"
        )
        first = found[names[0]]
        yield Finding("half model under autocast", message, advice, first.record.source, path_of([first]), len(names))


def half_inputs(recording: Recording) -> Iterator[Finding]:
    """Find inputs that were cast to lower precision before autocast saw them.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"half input"`` for the first op that reads one.
    """
    for op in recording.forward:
        # What an op writes into, such as memory that has just been allocated, is no input of it.
        if not op.autocast or op.record.rule == "cast" or op_name(op.record).endswith("_"):
            continue
        dtype = _half_input(recording, op)
        if not dtype:
            continue
        record = op.record
        message = (
            f"{op_name(record)}{where([op])} reads an input that comes in {dtype} into a region of {op.autocast}; autocast "
            "casts inputs by itself, and ops that it keeps in float32 get numbers that are rounded already"
        )
        advice = "hand the input over in float32: leave .half(), .bfloat16() or .to(dtype) on it away"
        yield Finding("half input", message, advice, record.source, path_of([op]))
        return  # what follows has it from here, or is the same fault


def _half_input(recording: Recording, op: RecordedOp) -> str:
    for operand, dtype in enumerate(op.record.came):
        if dtype not in LOW or not op.record.shapes_in[operand] or _is_parameter(op, operand):
            continue
        maker = recording.producer(op, operand)
        if maker is None and _is_leaf(op, operand):
            return dtype
        if maker is not None and _casts_an_input(recording, maker):
            return dtype
    return ""


def _casts_an_input(recording: Recording, op: RecordedOp) -> bool:
    if op.record.rule != "cast" or op.record.path or op.record.came[:1] != ("float32",):
        return False
    return recording.producer(op, 0) is None and _is_leaf(op, 0) and not _is_parameter(op, 0)


def _is_parameter(op: RecordedOp, operand: int) -> bool:
    return operand < len(op.parameters) and op.parameters[operand] is not None


def _is_leaf(op: RecordedOp, operand: int) -> bool:
    return operand < len(op.is_leaf) and op.is_leaf[operand]


def slow_dtypes(
    recording: Recording, slow: Callable[[str, str], str] = slow_reason, *, device: str = ""
) -> Iterator[Finding]:
    """Find matrix products in a dtype that the machine has no fast kernels for.

    Args:
        recording: The ops.
        slow: What says why a dtype is slow on a device type; empty if it is not.
        device: The device type of ops that do not say where they ran.

    Yields:
        A finding of the kind ``"slow dtype"`` for each dtype and device.
    """
    dots: dict[tuple[str, str], list[RecordedOp]] = {}
    for op in recording.ops:
        if op.record.dot and op.record.used and op.record.used[0] in LOW:
            dots.setdefault((op.record.used[0], device_of(op) or device), []).append(op)
    for (dtype, device), found in dots.items():
        reason = slow(dtype, device) if device else ""
        if not reason:
            continue
        other = next((one for one in LOW if one != dtype and not slow(one, device)), None)
        message = (
            f"{len(found)} matrix products and convolutions ran in {dtype} on {device}, which is slow here: {reason}"
        )
        cure = f"mezzo.torch.autocast({device!r}, dtype=torch.{other})" if other else "run without autocast here"
        yield Finding("slow dtype", message, cure, found[0].record.source, path_of(found[:1]), len(found))
