"""Gradients between the blocks of ``scale_loss``: multiplied by a scale on entry, divided and looked at on exit.

Apex put gradients aside on entry and added them again on exit, so that the new ones could be divided by their own scale.
Here those that are there are multiplied by the scale instead, which is exact for powers of two, and the backward pass adds
to them. So there is one gradient at any time: DDP's sums under ``no_sync``, views of buckets and hooks see all of it. Only
gradients in float16 (O3) are put aside, since multiplied they would overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mezzo.scaling import Verdict
from mezzo.torch.agreement import agree_, meshes
from mezzo.torch.eager import runs_eagerly
from mezzo.torch.scaling.gradients import collect
from mezzo.torch.scaling.nonfinite import count, parameter_names
from mezzo.torch.scaling.updating import add_up

if TYPE_CHECKING:
    from mezzo.apex.amp.loss_scaler import LossScaler
    from mezzo.apex.amp.stash import AmpStash

__all__ = ["is_zero", "multiply", "put_aside", "put_back", "unscale"]


def multiply(parameters: Sequence[Tensor], factor: float) -> None:
    """Multiply the gradients of parameters in place, in float32 or wider: float16 does not have the factor 65536.

    Args:
        parameters: Each has a gradient, of any dtype and layout.
        factor: The factor.
    """
    _divide(parameters, 1.0 / factor, agree=False)


def put_aside(parameters: Sequence[Tensor], *, every: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Take the float16 gradients of parameters away.

    Args:
        parameters: Each has a gradient.
        every: Take those of other dtypes too.

    Returns:
        What `put_back` takes.
    """
    aside = [
        # What is a view of DDP's bucket is written over by the next backward pass.
        (one, one.grad.clone() if one.grad._is_view() else one.grad)
        for one in parameters
        if one.grad is not None and (every or one.grad.dtype is torch.float16)
    ]
    for one, _ in aside:
        one.grad = None
    return aside


@torch.no_grad()
def put_back(aside: Sequence[tuple[Tensor, Tensor]], *, add: bool) -> None:
    """Give parameters back what `put_aside` took.

    Args:
        aside: What it gave.
        add: Whether gradients that have come since are added; else they are gone.
    """
    for one, gradient in aside:
        if add and one.grad is not None:
            # Not in place: the new one may be a view of DDP's bucket, or sparse.
            one.grad = gradient + one.grad
        else:
            one.grad = gradient


@runs_eagerly
@torch.no_grad()
def is_zero(parameters: Sequence[Tensor]) -> bool:
    """Say whether all gradients of parameters are zero; reads the device."""
    sums = [
        one.float()
        for gradients, _ in collect(parameters, {}).batches.values()
        for one in torch._foreach_norm(gradients, 1)
    ]
    # NaN is not zero.
    return not any(bool(one) for one in sums)


@runs_eagerly
def unscale(
    stashes: Sequence[AmpStash],
    parameters: Sequence[Tensor],
    scalers: Sequence[tuple[LossScaler, int]],
    *,
    arm: Sequence[AmpStash],
    check: bool = True,
    told: Verdict | None = None,
) -> Verdict | None:
    """Divide the gradients of optimizers by their factor, look at them, and arm skips if they are not finite.

    Args:
        stashes: Of the optimizers; their gradients are multiplied by one factor.
        parameters: Those of the optimizers, each once.
        scalers: Of the losses, each with its ``loss_id``; they are told the verdict.
        arm: Whose steps are skipped if it is an overflow.
        check: If false nobody is told; the flag is left in ``_overflow_buf``.
        told: What the scalers have been told before in the same block; they hear of one overflow, or one good pass.

    Returns:
        What they have been told now; None if nothing.
    """
    found = _divide(parameters, stashes[0].factor)
    for stash in stashes:
        stash.factor = 1.0
    if found is None:
        found = torch.zeros(())
    for scaler, _ in scalers:
        scaler._overflow_buf, scaler._has_overflow = found, False
    if not check:
        return told
    verdict = Verdict.FINITE if not found.item() else Verdict.INF
    if verdict is Verdict.INF:
        nan, inf = count(parameters).flags(found.device).tolist()
        verdict = Verdict.NAN if nan and not inf else Verdict.INF
        for stash in arm:
            stash.pending = scalers[0]
    if told is not None and (verdict is Verdict.FINITE or told is not Verdict.FINITE):
        return told
    for scaler, _ in {id(each): (each, at) for each, at in scalers}.values():
        scaler.take(verdict)
        if verdict is not Verdict.FINITE or scaler._nan_alone:
            scaler.tell(verdict, lambda: _describe(stashes, parameters))
    return verdict


@torch.no_grad()
def _divide(parameters: Sequence[Tensor], factor: float, *, agree: bool = True) -> Tensor | None:
    """Divide, and give a flag on a device that is not 0 if a value was not finite; None if there are no gradients."""
    gradients = collect(parameters, {})
    if not gradients.batches:
        return None
    device = next(iter(gradients.batches))[0]
    found = torch.zeros((), device=device)
    inverse = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
    flags = gradients.unscale_(inverse, found, look_again=factor < 1.0)
    if len(flags) > 1:
        found = add_up(list(flags.values()), device)
    if agree and gradients.originals:
        # Of DTensors each rank sees its part.
        agree_(found, meshes(parameters), None)
    return found


def _describe(stashes: Sequence[AmpStash], parameters: Sequence[Tensor]) -> str:
    counts = count(parameters)
    names = {}
    for stash in stashes:
        names.update(parameter_names(stash.optimizer, counts.parameters, {}))
    found = counts.read(names)
    rest = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return "; ".join(str(one) for one in found[:5]) + rest
