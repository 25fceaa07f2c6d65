"""``amp.scale_loss``: the block in which a scaled loss is propagated backward.

At the end of a block the gradients of the optimizers are unscaled and looked at, so several losses with scales of their own
may add to the same gradients, and clipping may come at any time before the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mezzo.apex.amp import casts
from mezzo.apex.amp._amp_state import _amp_state
from mezzo.apex.amp.loss_scaler import LossScaler
from mezzo.apex.amp.stash import AmpStash, stash_of
from mezzo.apex.amp.steps import recover
from mezzo.apex.amp.unscaling import look, multiply, put_aside, put_back, unscale
from mezzo.apex.amp.without_sync import is_without_sync
from mezzo.errors import AmpError, AmpTypeError
from mezzo.torch.master_copies import owner_of
from mezzo.torch.master_places import take_in

__all__ = ["scale_loss"]


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: object = None,  # noqa: ARG001 - Apex has it, and did not use it either
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Scale a loss, for its backward pass in a ``with`` block; at the end of the block gradients are unscaled.

    If they are not finite the scale falls, and the next ``step`` of these optimizers is skipped. After ``enabled=False``, or
    with the static scale 1.0, there is nothing to unscale or skip: the loss is given as it is.

    Args:
        loss: Any shape and floating dtype. What is given is float32.
        optimizers: The optimizer, or a list or tuple of all optimizers, whose parameters' gradients this loss adds to.
        loss_id: Which of the ``num_losses`` scalers of ``amp.initialize``.
        model: Not used.
        delay_unscale: Leave gradients scaled, in all blocks but the last before a step: saves passes over the gradients.
        delay_overflow_check: Unscale, and leave scale and step alone. ``update_scale()`` of
            ``amp._amp_state.loss_scalers[loss_id]`` then says whether to skip.

    Returns:
        A context manager that gives the scaled loss.

    Raises:
        AmpError: Before ``amp.initialize``, or an optimizer that it did not get; in the second case nothing has changed.
        IndexError: There is no such scaler.

    After an exception in the block, gradients that were there before are unscaled again, and new ones are gone. Not to be
    used for the same optimizer by two threads at once. Inside of the block O1 casts nothing, so the backward pass runs as
    PyTorch advises: outside of autocast.

    Example:
        >>> import torch
        >>> from mezzo.apex import amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
        >>> loss = model(torch.ones(3, 4)).square().mean()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> bool(scaled_loss == 128.0 * loss), model.weight.grad.dtype
        (True, torch.float32)
        >>> optimizer.step()

    Source: the page "Advanced Amp Usage" of Apex's documentation.
    """
    if not _amp_state.enabled:
        if _amp_state.opt_properties is None:
            msg = (
                "amp.scale_loss was called before amp.initialize. Call model, optimizer = amp.initialize(model, optimizer, "
                "opt_level=...) once, after the model and the optimizer are made."
            )
            raise AmpError(msg)
        yield loss
        return
    if not isinstance(loss, Tensor):
        kind = type(loss).__name__
        msg = f"amp.scale_loss takes the loss as a tensor, got {kind}. Add several losses up, or give each a block."
        raise AmpTypeError(msg)
    casts.ensure_here()
    scaler = _scaler(loss_id)
    stashes = _stashes(optimizers)
    scale = scaler.loss_scale()
    if scale == 1.0 and not scaler.dynamic:
        yield from _unwatched(loss.float(), stashes)
        return
    # Under DDP's no_sync each rank has gradients of its own. All ranks are to take one decision, so it waits for the sum.
    delay_unscale = delay_unscale or is_without_sync(stashes)
    before = _enter(stashes, scale, (scaler, loss_id), aside=not delay_unscale)
    try:
        with casts.without_casts():
            yield loss.float() * scale
            if not delay_unscale:
                unscale(stashes, (scaler, loss_id), before.parameters, check=not delay_overflow_check)
        put_back(before.aside, add=True)
    except BaseException:
        _abandon(stashes, before)
        raise
    finally:
        casts.forget_weight_casts()


def _unwatched(scaled: Tensor, stashes: Sequence[AmpStash]) -> Iterator[Tensor]:
    """Give a loss whose scale is 1 for good: nobody looks at its gradients, as without amp."""
    for stash in stashes:
        recover(stash)
    if any(stash.factor != 1.0 for stash in stashes):
        _enter(stashes, 1.0, None)
    try:
        with casts.without_casts():
            yield scaled
    finally:
        casts.forget_weight_casts()


def _scaler(loss_id: int) -> LossScaler:
    scalers = _amp_state.loss_scalers
    if not 0 <= loss_id < len(scalers):
        most = len(scalers) - 1
        msg = (
            f"loss_id={loss_id!r}, and amp.initialize made {len(scalers)} loss scaler(s), with loss_id 0 to {most}. Call "
            f"amp.initialize(..., num_losses={max(loss_id, 1) + 1}) for more."
        )
        raise IndexError(msg)
    return scalers[loss_id]


def _stashes(optimizers: Any) -> list[AmpStash]:
    listed = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    found: dict[int, AmpStash] = {}
    for each in listed:
        if not hasattr(each, "param_groups"):
            msg = f"amp.scale_loss takes an optimizer, or a list of optimizers, got {type(each).__name__}."
            raise AmpTypeError(msg)
        stash = stash_of(each)
        if stash is None:
            msg = (
                f"This {type(each).__name__} was not given to amp.initialize, or is a copy of one that was. Pass every "
                "optimizer that is used with scale_loss: amp.initialize(models, [first, second], ...)."
            )
            raise AmpError(msg)
        found[id(stash)] = stash
    return list(found.values())


@dataclass
class _Before:
    """What a block finds.

    Attributes:
        factors: Of each optimizer.
        parameters: Those of all of them.
        having: The ids of those that had gradients.
        aside: Gradients that are put aside.
    """

    factors: list[float]
    parameters: list[Tensor] = field(default_factory=list)
    having: set[int] = field(default_factory=set)
    aside: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def _enter(
    stashes: Sequence[AmpStash], scale: float, scaler: tuple[LossScaler, int] | None, *, aside: bool = False
) -> _Before:
    """Multiply the gradients that are there, so that the block can add to them."""
    before = _Before([stash.factor for stash in stashes])
    for stash in stashes:
        recover(stash)
        owner = owner_of(stash.optimizer)
        if owner is not None:
            # Groups that were added since get their masters before their first gradients come.
            take_in(stash.optimizer, owner)
        mine = stash.holders()
        before.parameters = before.parameters + mine if before.parameters else mine
        having = [one for one in mine if one.grad is not None and id(one) not in before.having]
        if stash.pending is not None:
            having = _after_overflow(stash, having, before)
        before.having.update(map(id, having))
        if having and aside and stash.factor == 1.0:
            before.aside += put_aside(having)
            having = [one for one in having if one.grad is not None]
        if having and stash.factor != scale:
            multiply(having, scale / stash.factor)
        stash.factor, stash.scaler = scale, scaler
    if len(stashes) > 1:
        # One that several optimizers have is looked at once.
        before.parameters = list({id(one): one for one in before.parameters}.values())
    return before


def _after_overflow(stash: AmpStash, having: list[Tensor], before: _Before) -> list[Tensor]:
    """See whether the gradients that overflowed are still there.

    If the user has zeroed them, the step that they would have spoilt is not skipped. If not, they are to spoil no other
    loss's verdict: they are put aside for the block, and the step is skipped.
    """
    if not having or look(having):
        stash.pending = None
        return having
    before.aside += put_aside(having, every=True)
    return []


def _abandon(stashes: Sequence[AmpStash], before: _Before) -> None:
    """Undo `_enter` after an exception in the block."""
    for one in before.parameters:
        if one.grad is not None and id(one) not in before.having:
            one.grad = None
    done: set[int] = {id(one) for one, _ in before.aside}
    for stash, factor in zip(stashes, before.factors, strict=True):
        mine = [one for one in stash.having() if id(one) not in done]
        if mine and stash.factor != factor:
            multiply(mine, factor / stash.factor)
        done.update(map(id, mine))
        stash.factor = factor
    put_back(before.aside, add=False)
