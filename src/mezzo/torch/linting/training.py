"""Steps of the training loop in the wrong order or place: the backward pass in a region, clipping of scaled gradients."""

from __future__ import annotations

from collections.abc import Iterator

from mezzo.report.findings import Finding
from mezzo.torch.recording.recorded import RecordedOp

from .recording import Recording

__all__ = ["backward_in_region", "scaled_gradients_clipped"]

_STARTS = "_make_grads"
"""The function of PyTorch's that makes the gradient of the loss, 1, when a backward pass is called for."""

_BEGINS = "begins the backward pass"
"""The reason of its record."""

_CLIPS = frozenset(("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"))
_KNOWS_THE_SCALE = frozenset(("clip_norm_", "clip_value_"))
"""What `mezzo.torch.GradScaler` clips with, scaled gradients or not."""


def backward_in_region(recording: Recording) -> Iterator[Finding]:
    """Find backward passes that were called for inside of an autocast region.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"backward in region"`` for the first.
    """
    starts = [op for op in recording.ops if _STARTS in op.callers or op.record.reason == _BEGINS]
    inside = [op for op in starts if op.autocast] if starts else _all_inside(recording)
    if not inside:
        return
    message = (
        f"the backward pass was called inside of the region of {inside[0].autocast}: autocast chooses the dtypes of its ops "
        "anew, so gradients of what the forward pass kept in float32 may be computed low"
    )
    advice = "end the region after the loss: loss.backward() stands one level further left than the `with` block"
    yield Finding("backward in region", message, advice, inside[0].record.source, (), len(inside) if starts else 1)


def _all_inside(recording: Recording) -> list[RecordedOp]:
    """Give the first backward op if all ran under autocast; some do in any case, in what `custom_bwd` decorates."""
    backward = [op for op in recording.ops if op.record.phase == "backward"]
    return backward[:1] if backward and all(op.autocast for op in backward) else []


def scaled_gradients_clipped(recording: Recording) -> Iterator[Finding]:
    """Find clipping, by PyTorch's functions, of gradients that still have the scale of a scaler.

    Args:
        recording: The ops.

    Yields:
        A finding of the kind ``"scaled gradients clipped"`` for the first.
    """
    scaled, found = False, []
    clipping = False
    for op in recording.ops:
        clips = not _CLIPS.isdisjoint(op.callers) and _KNOWS_THE_SCALE.isdisjoint(op.callers)
        if clips and scaled and not clipping:
            found.append(op)
        clipping = clips
        if "scale" in op.callers:
            scaled = True
        elif "unscale_" in op.callers or "step" in op.callers:
            scaled = False
    if found:
        message = (
            "gradients were clipped while they had the scale of the scaler: a norm that is thousands of times too large, so "
            "that next to nothing is left of them"
        )
        advice = (
            "scaler.unscale_(optimizer) before it; mezzo's scaler.clip_grad_norm_(optimizer, max_norm) need not be told"
        )
        yield Finding("scaled gradients clipped", message, advice, found[0].record.source, (), len(found))
