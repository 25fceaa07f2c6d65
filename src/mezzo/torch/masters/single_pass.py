"""One optimizer step in one pass: gradient, float32 master, moments and low-precision weight are each read and written once.

The ordinary step over masters converts all gradients to float32, steps, and copies all masters to the model: three passes
over the memory and a temporary copy of all gradients. PyTorch's Adam, AdamW and SGD are done here instead where that gives
what their own step gives. Everything else is left to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo.torch.agreement import local
from mezzo.torch.eager import runs_eagerly
from mezzo.torch.masters import blocked_pass, compiled_pass

from .blocked_pass import Numbers
from .params import Master

__all__ = ["Flat", "find", "flatten", "has_values", "is_read_late", "update_", "update_found_"]

_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)

_LOW = frozenset({torch.bfloat16, torch.float16})
_SMALL = 2**14
"""Below this number of elements the call of a compiled function costs more than its pass saves."""


class Flat(NamedTuple):
    """A master with its tensors as 1-D views of their memory, all in the same order.

    Attributes:
        master: The master.
        gradient: float32 or low.
        wide: The values of the master, float32; where it has none between steps, the parameter of the model.
        low: The parameter of the model.
        compensation: What is to be added to it, where there is that.
    """

    master: Master
    gradient: Tensor
    wide: Tensor
    low: Tensor
    compensation: Tensor | None = None

    @property
    def is_held(self) -> bool:
        """Whether all that stands for the master is one float32 tensor, rounded to nearest to the model."""
        at_random = self.master.owner.settings.rounds_at_random
        return self.wide.dtype is torch.float32 and self.compensation is None and not at_random

    def like(self) -> Tensor:
        """Give a tensor in the shape of the parameter and the order of memory of the master's values."""
        return self.master.values() if self.wide.dtype is torch.float32 else self.master.model_param


def is_read_late(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Say whether the step of a group asks for gradients before it looks at values, so that `find` is asked first."""
    return type(optimizer) in _OPTIMIZERS and bool(group.get("fused"))


def has_values(master: Master) -> bool:
    """Say whether a master has its values; one without dimensions always seems to."""
    values = local(master.values())
    return master.owner.settings.keeps_masters or not values.dim() or any(values.stride())


@runs_eagerly
def update_(optimizer: torch.optim.Optimizer, group: dict[str, Any], *, compiled: bool) -> list[Master]:
    """Step the masters of a group that can be stepped in one pass: master, optimizer state and the model's parameter.

    Can be: a master with a dense float32 or low-precision gradient, in an optimizer that is exactly a `torch.optim.Adam`,
    `AdamW` or `SGD`, not capturable and not differentiable. The parameter of the model is rounded as its settings say; a
    master without values between steps, or rounded stochastically, is done in blocks alone. A scaler's ``grad_scale`` and
    ``found_inf`` on the optimizer are heeded as PyTorch's fused steps do; where ``found_inf`` is not 0, nothing changes. On
    a CPU it is read, as PyTorch's kernels do; elsewhere nothing is read on the host.

    Args:
        optimizer: The optimizer, in its ``step``.
        group: One of its ``param_groups``.
        compiled: Whether to use a compiled function, on CPU and CUDA. Its results are a few units in the last place from
            the optimizer's own. If False, only groups with ``fused=True`` on a CPU are done, in blocks that stay in the
            cache, by PyTorch's own fused kernels: the results are those of the optimizer, bit for bit.

    Returns:
        The masters that are done. The others are left as they are, for the optimizer's own step; under a dispatch mode
        that is all of them.

    Raises:
        PreparationError: ``compiled`` was asked for, and there is no working compiler. No value has changed.

    Different optimizers may be stepped by several threads at once.

    Example:
        >>> import mezzo.torch
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> model, optimizer = mezzo.torch.prepare(model, optimizer)
        >>> with mezzo.torch.autocast("cpu", dtype=torch.bfloat16):
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> [tuple(one.shape) for one in update_(optimizer, optimizer.param_groups[0], compiled=False)]
        [(4, 4), (4,)]
    """
    numbers = Numbers()
    done = update_found_(
        optimizer, group, find(optimizer, group, compiled=compiled), compiled=compiled, numbers=numbers
    )
    numbers.close()
    return done


@runs_eagerly
def find(optimizer: torch.optim.Optimizer, group: dict[str, Any], *, compiled: bool) -> list[Flat]:
    """Find the masters that `update_` would step; nothing is changed.

    Args:
        optimizer: As `update_` takes it.
        group: As there.
        compiled: As there.

    Returns:
        What `update_found_` takes, in the order of the group.
    """
    if not (compiled or group.get("fused")) or not _is_known(optimizer, group) or torch._C._len_torch_dispatch_stack():
        return []
    names = state_names(optimizer, group)
    with torch.no_grad(), torch._C._DisableAutocast():
        flat = [found for one in group["params"] if (found := _flat(optimizer, one, names)) is not None]
    return [each for each in flat if _goes_in_blocks(each, group, compiled) or _is_compiled(each, compiled)]


@runs_eagerly
def update_found_(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], flat: list[Flat], *, compiled: bool, numbers: Numbers
) -> list[Master]:
    """Step what `find` gave, or some of it; see `update_`.

    Args:
        optimizer: As `update_` takes it.
        group: As there.
        flat: The masters.
        compiled: As there.
        numbers: For stochastic rounding; to be closed when all groups are done.

    Returns:
        The masters.

    Raises:
        PreparationError: As there.
    """
    with torch.no_grad(), torch._C._DisableAutocast():
        for device, some in itertools.groupby(flat, lambda each: each.low.device):
            _update_on(device, optimizer, group, list(some), compiled, numbers)
    return [each.master for each in flat]


def _update_on(
    device: torch.device,
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    flat: list[Flat],
    compiled: bool,
    numbers: Numbers,
) -> None:
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    in_blocks = [each for each in flat if _goes_in_blocks(each, group, compiled)]
    in_one = [each for each in flat if not _goes_in_blocks(each, group, compiled)]
    # It is the first thing that may fail.
    guarded = found is not None and device.type != "cpu"
    kernels = [compiled_pass.kernel(optimizer, group, each, scale is not None, guarded) for each in in_one]
    _fill_state(optimizer, group, flat)
    if found is not None and not guarded and found.item():
        return
    scale = None if scale is None else scale.to(device, non_blocking=True)
    if in_blocks:
        blocked_pass.update_(optimizer, group, in_blocks, scale, numbers)
    if in_one:
        skip = found.to(device, non_blocking=True) != 0 if guarded and found is not None else None
        compiled_pass.update_(optimizer, group, in_one, kernels, scale, skip)


def _goes_in_blocks(each: Flat, group: dict[str, Any], compiled: bool) -> bool:
    if each.low.device.type != "cpu" or not group.get("fused"):
        return False
    return not (compiled and each.is_held) or each.low.numel() < _SMALL


def _is_compiled(each: Flat, compiled: bool) -> bool:
    return compiled and each.is_held and each.low.device.type in ("cpu", "cuda")


def _is_known(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Say whether the formula of a group is known, and its numbers can be read without waiting for a device."""
    if type(optimizer) not in _OPTIMIZERS:
        return False
    if group["differentiable"] or group.get("capturable"):
        return False
    numbers = [group["lr"], group["weight_decay"], *group.get("betas", ())]
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    # PyTorch's foreach step raises an error for them.
    return not tensors or (not group["foreach"] and all(number.is_cpu for number in tensors))


def state_names(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    """Name the tensors that an optimizer keeps for a parameter of a group, which have its shape."""
    if type(optimizer) is torch.optim.SGD:
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def flatten(tensor: Tensor) -> Tensor:
    """Give a dense tensor's memory as a 1-D tensor that shares its version counter."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _flat(optimizer: Any, master: Any, names: Iterable[str]) -> Flat | None:
    """Give a master with its tensors if one pass can do it."""
    if not isinstance(master, Master) or master.model_param.grad is None:
        return None
    low, gradient, lacking = master.model_param, master.model_param.grad, master.compensation
    if low.dtype not in _LOW or not (gradient.dtype is torch.float32 or gradient.dtype in _LOW):
        return None
    state = optimizer.state.get(master) or {}
    if not _is_whole(optimizer, state, names):
        return None
    held = has_values(master)
    wide = master.values() if held else low
    kept = [tensor for name in names if (tensor := state.get(name)) is not None]
    if any(one.dtype is not torch.float32 for one in (*([wide] if held else []), *kept)):
        return None
    if not _are_alike(wide, [low, gradient, *([] if lacking is None else [lacking]), *kept]):
        return None
    return Flat(master, flatten(gradient), flatten(wide), flatten(low), None if lacking is None else flatten(lacking))


def _is_whole(optimizer: Any, state: dict[str, Any], names: Iterable[str]) -> bool:
    """Say whether the state of a master is what the optimizer makes; an older one may lack something."""
    if not state or type(optimizer) is torch.optim.SGD:
        return True
    step = state.get("step")
    counted = isinstance(step, Tensor) and step.dtype in (torch.float32, torch.float64)
    return counted and all(state.get(name) is not None for name in names)


def _are_alike(first: Tensor, others: Iterable[Tensor]) -> bool:
    """Say whether tensors are ordinary ones of one shape whose elements lie in the same order, without gaps."""
    if not _is_ordinary(first) or not all(_is_ordinary(one) for one in others):
        return False
    if any(one.shape != first.shape or one.device != first.device for one in others):
        return False
    if first.is_contiguous():
        return all(one.is_contiguous() for one in others)
    return _is_dense(first) and all(one.stride() == first.stride() for one in others)


def _is_ordinary(tensor: Tensor) -> bool:
    # Subclasses that see what is done with them have a function of their own here.
    return (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    )


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _fill_state(optimizer: Any, group: dict[str, Any], flat: list[Flat]) -> None:
    """Let Adam make the state of its first step by itself."""
    if type(optimizer) is torch.optim.SGD:
        return
    fresh = [each for each in flat if not optimizer.state.get(each.master)]
    if not fresh:
        return
    optimizer._init_group({**group, "params": [each.master for each in fresh]}, [], [], [], [], [], [])
    for each in fresh:
        state = optimizer.state[each.master]
        for name in state_names(optimizer, group):
            # What stands for values that are not there has no order of memory to be preserved.
            if state[name].stride() != each.like().stride():
                state[name] = torch.zeros_like(each.like(), dtype=torch.float32)
