"""``amp.scale_loss``: the block in which a scaled loss is propagated backward.

At the end of a block the gradients of the optimizers are unscaled and looked at, so several losses with scales of their own
may add to the same gradients, and clipping may come at any time before the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mezzo.apex.amp import casts
from mezzo.apex.amp._amp_state import _amp_state
from mezzo.apex.amp.blocks import Block, block_around
from mezzo.apex.amp.loss_scaler import LossScaler
from mezzo.apex.amp.stash import AmpStash, sharing, stash_of
from mezzo.apex.amp.steps import recover
from mezzo.apex.amp.without_sync import is_without_sync
from mezzo.errors import AmpError, AmpTypeError

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
        AmpError: Before ``amp.initialize``, an optimizer that it did not get, or a block inside of two of different scales.
            Nothing has changed then.
        IndexError: There is no such scaler.

    A block inside of another one of the same optimizer adds to the same gradients, so its loss is multiplied by the scale of
    the outer one, and the outer one unscales. A step inside of a block gets unscaled gradients.

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
    around = block_around([*stashes, *sharing(stashes)])
    unwatched = scaler.loss_scale() == 1.0 and not scaler.dynamic
    if unwatched and around is None and all(stash.factor == 1.0 for stash in stashes):
        yield from _unwatched(loss.float(), stashes)
        return
    block = Block(
        [stash for stash in stashes if stash.block is None],
        scaler.loss_scale() if around is None else around.scale,
        [(scaler, loss_id)],
        # Under DDP's no_sync each rank has gradients of its own. All ranks are to take one decision: it waits for the sum.
        delay=delay_unscale or is_without_sync(stashes),
        check=not (delay_overflow_check or unwatched),
    )
    if around is not None:
        around.scalers.append((scaler, loss_id))
    try:
        block.enter()
        with casts.without_casts():
            yield loss.float() * block.scale
            block.leave()
    except BaseException:
        block.abandon()
        raise
    finally:
        casts.forget_weight_casts()


def _unwatched(scaled: Tensor, stashes: Sequence[AmpStash]) -> Iterator[Tensor]:
    """Give a loss whose scale is 1 for good: nobody looks at its gradients, as without amp."""
    for stash in stashes:
        recover(stash)
    try:
        with casts.without_casts():
            yield scaled
    finally:
        casts.forget_weight_casts()


def _scaler(loss_id: int) -> LossScaler:
    scalers = _amp_state.loss_scalers
    if isinstance(loss_id, bool) or not isinstance(loss_id, int):
        msg = f"loss_id is the number of a loss, an int from 0; got {loss_id!r}."
        raise AmpTypeError(msg)
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
