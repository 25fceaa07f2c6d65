"""What is done around an optimizer's step: gradients and values are given to masters, and the model is refreshed.

When it is done, `mezzo.torch.master_hooks` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FrameType

import torch
from torch import Tensor

from mezzo.torch import single_pass
from mezzo.torch.agreement import local
from mezzo.torch.master_params import Master, masters_in, no_values, state_of, take_over_writes
from mezzo.torch.master_places import take_in
from mezzo.torch.master_settings import Owner
from mezzo.torch.rounding import round_nearest_, round_stochastic_, split_, widen_

__all__ = [
    "close_gradients",
    "drop_values",
    "fill_values",
    "refresh_model",
    "show_gradients",
    "versions_of",
    "write_back",
    "write_back_changed",
]


def versions_of(optimizer: torch.optim.Optimizer) -> list[int]:
    """Give what counts the writes to each master; PyTorch's fused steps are not among them."""
    return [one._version for one in masters_in(optimizer)]  # type: ignore[attr-defined]


# Before a step


@torch.no_grad()
def fill_values(optimizer: torch.optim.Optimizer, owner: Owner) -> None:
    """Bring masters up to date with the model, and give those that have no values between steps theirs."""
    take_in(optimizer, owner)
    masters = masters_in(optimizer)
    for one in masters:
        take_over_writes(one)
    empty = [one for one in masters if not one.owner.settings.keeps_masters]
    if not empty:
        return
    low = [one.model_param.detach() for one in empty]
    wide = [torch.empty_like(each, dtype=torch.float32) for each in low]
    compensation = [one.compensation for one in empty if one.compensation is not None]
    widen_(wide, low, compensation or None)
    for one, values in zip(empty, wide, strict=True):
        one.put(values)


def close_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Show the gradients of the model again."""
    for one in masters_in(optimizer):
        one.owner.close_step()


@torch.no_grad()
def show_gradients(optimizer: torch.optim.Optimizer, frame: FrameType) -> None:
    """Let a step see float32 gradients, and none for the parameters whose step is done already.

    Args:
        optimizer: Whose step.
        frame: They are shown to what it calls.
    """
    done = _step_in_one_pass(optimizer)
    shown: dict[int, Tensor | None] = dict.fromkeys(map(id, done))
    masters = masters_in(optimizer)
    left = [(one, one.model_param.grad) for one in masters if id(one) not in shown]
    shown.update(_widened([(one, gradient) for one, gradient in left if gradient is not None]))
    for one in masters:
        one.owner.open_step(frame, shown)


def _widened(gradients: Sequence[tuple[Master, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Give float32 copies of the gradients that are not, by the identity of their masters."""
    narrow = [(one, gradient) for one, gradient in gradients if gradient.dtype.itemsize < torch.float32.itemsize]
    dense = [(one, gradient) for one, gradient in narrow if gradient.layout is torch.strided]
    if dense:
        wide = [torch.empty_like(gradient, dtype=torch.float32) for _, gradient in dense]
        widen_(wide, [gradient for _, gradient in dense], None)
        yield from ((id(one), gradient) for (one, _), gradient in zip(dense, wide, strict=True))
    yield from ((id(one), gradient.float()) for one, gradient in narrow if gradient.layout is not torch.strided)


def _step_in_one_pass(optimizer: torch.optim.Optimizer) -> list[Master]:
    done = []
    for group in optimizer.param_groups:
        settings = next((one.owner.settings for one in group["params"] if isinstance(one, Master)), None)
        if settings is not None and settings.keeps_masters and not settings.rounds_at_random:
            done += single_pass.update_(optimizer, group, compiled=settings.compiled)
    for one in done:
        one.seen = state_of(one.model_param)
    return done


# After a step


def write_back_changed(optimizer: torch.optim.Optimizer, before: list[int]) -> list[int]:
    """Refresh what of the model a step may have changed.

    Args:
        optimizer: Whose step is done.
        before: The versions of its masters before.

    Returns:
        The versions now.
    """
    masters = masters_in(optimizer)
    done: set[int] = set()
    for one in masters:
        done |= one.owner.done_in_step()
        one.owner.close_step()
    now = versions_of(optimizer)
    changed = [
        one
        for one, old, new in zip(masters, before, now, strict=True)
        if id(one) not in done and (old != new or _is_exact(one) or one.model_param.grad is not None)
    ]
    write_back(changed, getattr(optimizer, "found_inf", None))
    return now


def _is_exact(master: Master) -> bool:
    # To round again to nearest changes nothing, and some optimizers leave no trace of what they write.
    return master.owner.settings.keeps_masters and not master.owner.settings.rounds_at_random


def refresh_model(optimizer: torch.optim.Optimizer) -> None:
    """Write the masters' values to the model, after they were changed by hand or put back.

    Args:
        optimizer: Any optimizer; without masters nothing is done.
    """
    masters = masters_in(optimizer)
    for one in masters:
        one.owner.close_step()
    write_back([one for one in masters if _has_values(one)], None)
    drop_values(optimizer)


@torch.no_grad()
def write_back(masters: Sequence[Master], skip: Tensor | None) -> None:
    """Round masters to the parameters of the model: one call per dtype.

    Args:
        masters: The masters.
        skip: A flag; where it is not 0 the model stays as it is. It is read if it is on a CPU.
    """
    if skip is not None and skip.device.type == "cpu":
        if skip.item():
            return
        skip = None
    for owner in {id(one.owner): one.owner for one in masters}.values():
        _write_back_for(owner, [one for one in masters if one.owner is owner], skip)
    for one in masters:
        one.seen, one.loaded = state_of(one.model_param), None


def _write_back_for(owner: Owner, masters: Sequence[Master], skip: Tensor | None) -> None:
    settings, count = owner.settings, owner.rounds
    low = [one.model_param.detach() for one in masters]
    wide = [one.values() for one in masters]
    compensation = [one.compensation for one in masters if one.compensation is not None]
    seed = settings.seed if settings.rounds_at_random else None
    if compensation:
        split_(low, compensation, wide, seed=seed, count=count, skip=skip)
    elif seed is not None:
        round_stochastic_(low, wide, seed=seed, count=count, skip=skip)
    else:
        round_nearest_(low, wide)
    owner.rounds += settings.rounds_at_random


def _has_values(master: Master) -> bool:
    values = local(master.values())
    return master.owner.settings.keeps_masters or not values.numel() or 0 not in values.stride()


def drop_values(optimizer: torch.optim.Optimizer) -> None:
    """Let go of values that are not kept between steps."""
    for one in masters_in(optimizer):
        if not one.owner.settings.keeps_masters:
            one.put(no_values(one.model_param))
