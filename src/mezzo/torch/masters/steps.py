"""What is done around an optimizer's step: gradients and values are given to masters, and the model is refreshed.

When it is done, `mezzo.torch.masters.hooks` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mezzo.torch.agreement import local
from mezzo.torch.masters import single_pass

from .blocked_pass import Numbers
from .params import Master, masters_in, no_values, state_of, take_over_writes
from .places import take_in
from .rounding import round_nearest_, round_stochastic_, split_, widen_
from .settings import Owner
from .single_pass import Flat

__all__ = [
    "close_gradients",
    "drop_values",
    "fill_values",
    "refresh_model",
    "show_gradients",
    "versions_of",
    "write_back",
    "write_back_changed",
    "write_back_moved",
]


def versions_of(optimizer: torch.optim.Optimizer) -> list[int]:
    """Give what counts the writes to each master; PyTorch's fused steps are not among them."""
    return [one._version for one in masters_in(optimizer)]


# Before a step


@torch.no_grad()
def fill_values(optimizer: torch.optim.Optimizer, owner: Owner) -> None:
    """Bring masters up to date with the model, and give those that have no values between steps theirs.

    Where nobody looks at values before the step asks for gradients, `show_gradients` gives those that it needs.
    """
    take_in(optimizer, owner)
    for one in masters_in(optimizer):
        take_over_writes(one)
    seen = _is_looked_at(optimizer)
    now: list[Master] = []
    for group in optimizer.param_groups:
        empty = [one for one in group["params"] if isinstance(one, Master) and not one.owner.settings.keeps_masters]
        wait = not seen and single_pass.is_read_late(optimizer, group)
        # A step around this one may have given them values that it goes on with.
        empty = [
            one for one in empty if not (single_pass.has_values(one) and one.owner.is_in_step_of_another(optimizer))
        ]
        # Of one without dimensions it cannot be told later whether its value is there.
        now += [one for one in empty if not wait or not local(one.model_param).dim()]
        # Left by a step that has failed.
        _empty([one for one in empty if wait and single_pass.has_values(one)])
    _fill(now)


def _is_looked_at(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether there are hooks of others around the step, which see the masters' values and may change them."""
    ours = __name__.partition(".")[0]
    hooks = (
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    )
    return any((getattr(hook, "__module__", None) or "").partition(".")[0] != ours for hook in hooks)


def _fill(empty: Sequence[Master]) -> None:
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
def show_gradients(optimizer: torch.optim.Optimizer, frame: FrameType, *, step: bool = True) -> None:
    """Let a step see float32 gradients, and none for the parameters whose step is done already.

    Args:
        optimizer: Whose step.
        frame: They are shown to what it calls.
        step: Whether to step here where one pass can do it; not before a closure, which brings gradients of its own.
    """
    done = _step_in_one_pass(optimizer) if step else []
    shown: dict[int, Tensor | None] = dict.fromkeys(map(id, done))
    masters = masters_in(optimizer)
    left = [(one, one.model_param.grad) for one in masters if id(one) not in shown]
    late = [one for one, gradient in left if gradient is not None and not single_pass.has_values(one)]
    for one in late:
        # A closure may have written to the model since the step began.
        take_over_writes(one)
    _fill(late)
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
    done, numbers = [], Numbers()
    for group, compiled, flat in _to_do_in_one_pass(optimizer):
        done += single_pass.update_found_(optimizer, group, flat, compiled=compiled, numbers=numbers)
    numbers.close()
    for one in done:
        one.written = one._version
        now = state_of(one.model_param)
        if now != one.seen:
            one.seen, one.loaded = now, None
    return done


def _to_do_in_one_pass(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], bool, list[Flat]]]:
    """Give for each group whether its pass is compiled, and the masters that one pass can do."""
    found = []
    for group in optimizer.param_groups:
        masters = [one for one in group["params"] if isinstance(one, Master)]
        compiled = bool(masters) and masters[0].owner.settings.compiled
        found.append((group, compiled, single_pass.find(optimizer, group, compiled=compiled) if masters else []))
    there = {id(each.master) for _, _, flat in found for each in flat}
    # Random numbers are drawn for one parameter after the other: all of them in one pass, or none.
    not_all = {
        one.owner
        for one in masters_in(optimizer)
        if one.owner.settings.rounds_at_random and one.model_param.grad is not None and id(one) not in there
    }
    if not not_all:
        return found
    return [(group, by, [each for each in flat if each.master.owner not in not_all]) for group, by, flat in found]


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
    for one in masters:
        one.written = one._version
    return now


def write_back_moved(optimizer: torch.optim.Optimizer, before: list[int]) -> list[int]:
    """Refresh what of the model has moved in a step so far.

    Args:
        optimizer: In whose step a closure is about to evaluate the model.
        before: The versions of its masters when the model was last refreshed.

    Returns:
        The versions now.
    """
    now = versions_of(optimizer)
    pairs = zip(masters_in(optimizer), before, now, strict=True)
    write_back([one for one, old, new in pairs if old != new or _is_exact(one)], None)
    return now


def _is_exact(master: Master) -> bool:
    # To round again to nearest changes nothing, and some optimizers leave no trace of what they write.
    return master.owner.settings.keeps_masters and not master.owner.settings.rounds_at_random


def refresh_model(optimizer: torch.optim.Optimizer) -> None:
    """Write the masters' values to the model, after they were changed by hand outside of a step.

    A forward pass of the model in eager code does it where it can see that they were: not where they were written to by
    ``master.data``, nor in code that `torch.compile` has compiled, nor for whoever reads weights without a forward pass.

    Args:
        optimizer: Any optimizer; where it keeps no masters between steps nothing is done.

    Not to be called while another thread uses the model.

    Example:
        >>> import mezzo.torch
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer = mezzo.torch.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for one in mezzo.torch.master_params(optimizer):
        ...     one.data.fill_(0.5)
        tensor([[0.5000]])
        tensor([0.5000])
        >>> refresh_model(optimizer)
        >>> model.bias.item()
        0.5
    """
    write_back([one for one in masters_in(optimizer) if one.owner.settings.keeps_masters], None)


@torch.no_grad()
def write_back(masters: Sequence[Master], skip: Tensor | None) -> None:
    """Round masters to the parameters of the model: one call per dtype.

    Args:
        masters: The masters; those that have no values are left out.
        skip: A flag; where it is not 0 the model stays as it is. It is read if it is on a CPU.
    """
    if skip is not None and skip.device.type == "cpu":
        if skip.item():
            return
        skip = None
    masters = [one for one in masters if single_pass.has_values(one)]
    for owner in {id(one.owner): one.owner for one in masters}.values():
        _write_back_for(owner, [one for one in masters if one.owner is owner], skip)
    for one in masters:
        one.seen, one.loaded = state_of(one.model_param), None
        one.written = one._version


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


def drop_values(optimizer: torch.optim.Optimizer) -> None:
    """Let go of values that are not kept between steps."""
    masters = [one for one in masters_in(optimizer) if not one.owner.settings.keeps_masters]
    _empty([one for one in masters if not one.owner.is_in_step_of_another(optimizer)])


def _empty(masters: Sequence[Master]) -> None:
    for one in masters:
        one.put(no_values(one.model_param))
