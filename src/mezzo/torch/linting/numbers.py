"""Numbers that do not survive a lower precision: constants, losses, and probabilities of which a logarithm is taken."""

from __future__ import annotations

from collections.abc import Iterator

from mezzo.report.findings import Finding
from mezzo.torch.recording.recorded import RecordedOp

from .constants import becomes_one, largest, smallest, vanishes
from .places import base_name, by_place, op_name, path_of, precision_line, where
from .recording import LOW, Recording, low_result

__all__ = ["LOSSES", "bce_after_sigmoid", "float16_losses", "lost_constants"]

_ADDS = ("add", "clamp", "clamp_min", "maximum", "_foreach_add", "_foreach_clamp_min", "_foreach_maximum")
_MAKES_CONSTANTS = frozenset(("aten::scalar_tensor", "aten::full"))

LOSSES = frozenset(
    (
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy_loss"),
        *("ctc_loss", "_ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss"),
        *("margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss"),
        *("multilabel_margin_loss_forward", "nll_loss", "nll_loss_nd", "nll_loss_forward", "nll_loss2d"),
        *("nll_loss2d_forward", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss"),
    )
)
"""Ops that are a loss."""


def lost_constants(recording: Recording) -> Iterator[Finding]:
    """Find small numbers added, or clamped to, in a dtype in which they are 0, and bounds below 1 that are 1 in it.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"eps lost"`` for each place and number.
    """
    ops, lost = [], []
    for op in recording.ops:
        number = _lost_number(recording, op)
        if number is not None:
            ops.append(op)
            lost.append(number)
    number_of = {id(op): number for op, number in zip(ops, lost, strict=True)}
    for group in by_place(ops, lost):
        number, low, record = number_of[id(group[0])], low_result(group[0].record), group[0].record
        if number < 0.5:
            what = f"{number:g} is 0 in {low}, whose smallest number is {smallest(low):.1g}"
        else:
            what = f"{number!r} is 1 in {low}, so that 1 minus it is 0"
        message = f"{op_name(record)}{where(group)} has the constant {number!r} and computes in {low}: {what}"
        yield Finding("eps lost", message, _eps_advice(group, low), record.source, path_of(group), len(group))


def _lost_number(recording: Recording, op: RecordedOp) -> float | None:
    base, low = base_name(op.record), low_result(op.record)
    if base not in _ADDS or not low:
        return None
    for number in _constants(recording, op):
        if number > 0 and vanishes(number, low):
            return float(number)
        if base == "clamp" and becomes_one(number, low):
            return float(number)
    return None


def _constants(recording: Recording, op: RecordedOp) -> tuple[float, ...]:
    """Give the numbers that an op works with, also those that were made into a tensor of no dimension for it."""
    shapes = op.record.shapes_in
    found = (
        [*op.scalars] if base_name(op.record) != "add" or len(shapes) == 1 else []
    )  # of two tensors it is the factor alpha
    for operand, shape in enumerate(shapes):
        maker = recording.producer(op, operand) if not shape else None
        if maker is not None and maker.record.op in _MAKES_CONSTANTS:
            found += maker.scalars
    return tuple(found)


def _eps_advice(group: list[RecordedOp], low: str) -> str:
    if group[0].record.phase == "optimizer":
        return (
            "keep the weights in float32, or give them masters: model, optimizer = mezzo.torch.prepare(model, optimizer); "
            "or fused=True, which computes in float32"
        )
    return f"compute it in float32: {precision_line(group, 'fp32')}; or take a number that {low} holds, such as 1e-4"


def float16_losses(recording: Recording) -> Iterator[Finding]:
    """Find losses that were computed, or are to be scaled, in float16.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"float16 loss"`` for each place.
    """
    losses = [op for op in recording.forward if op_name(op.record) in LOSSES and low_result(op.record) == "float16"]
    for group in by_place(losses):
        record = group[0].record
        message = (
            f"{op_name(record)}{where(group)} computes the loss in float16: it ends at {largest('float16'):g}, and sums of "
            "many terms are rounded to 3 digits"
        )
        advice = "hand float32 over, loss_fn(output.float(), target), or call it in a region with a rule that has it so"
        yield Finding("float16 loss", message, advice, record.source, path_of(group), len(group))
    if not losses:
        yield from _scaled_in_float16(recording)


def _scaled_in_float16(recording: Recording) -> Iterator[Finding]:
    scaled = [op for op in recording.ops if "scale" in op.callers and "float16" in op.record.came]
    for group in by_place(scaled):
        record = group[0].record
        message = (
            "the loss that the scaler is given is float16: times the scale it is infinite as soon as it is above "
            f"{largest('float16'):g} / scale, and the step is skipped"
        )
        advice = "scaler.scale(loss.float()), and compute the loss from output.float()"
        yield Finding("float16 loss", message, advice, record.source, path_of(group), len(group))


def bce_after_sigmoid(recording: Recording) -> Iterator[Finding]:
    """Find binary cross-entropies of probabilities that a sigmoid gave under autocast or in lower precision.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"bce after sigmoid"`` for each place.
    """
    found = [op for op in recording.forward if op_name(op.record) == "binary_cross_entropy" and _sigmoid(recording, op)]
    for group in by_place(found):
        record, sigmoid = group[0].record, _sigmoid(recording, group[0])
        gave = sigmoid.record.gave[0] if sigmoid is not None else ""
        rounds = f", which is 1 in {gave} from {_ONE[gave]} on" if gave in LOW else ""
        message = (
            f"binary_cross_entropy{where(group)} takes the logarithm of a sigmoid{rounds}: the loss is cut at 100 there and "
            "has no gradient"
        )
        advice = (
            "F.binary_cross_entropy_with_logits(logits, target), or nn.BCEWithLogitsLoss(), with no sigmoid before it"
        )
        yield Finding("bce after sigmoid", message, advice, record.source, path_of(group), len(group))


_ONE = {"float16": "8.4", "bfloat16": "6.3"}
"""The logit from which the sigmoid rounds to 1: half a step below 1 is 2**-12, or 2**-9."""


def _sigmoid(recording: Recording, op: RecordedOp) -> RecordedOp | None:
    maker = recording.producer(op, 0)
    while maker is not None and maker.record.rule == "cast":
        maker = recording.producer(maker, 0)
    if maker is None or op_name(maker.record) not in ("sigmoid", "sigmoid_"):
        return None
    return maker if op.autocast or maker.autocast or low_result(maker.record) else None
