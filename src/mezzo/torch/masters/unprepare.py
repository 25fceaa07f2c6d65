"""Undoing `mezzo.torch.prepare`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .copies import detach
from .gradients import replace_values, set_gradient
from .params import Master, master_of, take_over_writes
from .places import cast_state, swap
from .preparation import unmark, warn_of_rounded
from .prepare_checks import check_undo, checked

__all__ = ["unprepare"]


def unprepare(model: nn.Module, optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer] | None = None) -> None:
    """Undo `mezzo.torch.prepare`: parameters are float32 again, as the masters, and the optimizer holds them itself.

    Args:
        model: A model that was prepared, or a copy of one.
        optimizer: Its optimizer, or the list of them; needed if it has masters.

    Raises:
        PreparationError: The model is not prepared, or its masters belong to an optimizer that was not given. Nothing is
            changed then.

    Where masters are gone with their optimizer, a warning says so: the values come rounded.

    Not to be called while another thread uses the model or the optimizer.

    Example:
        >>> import mezzo.torch
        >>> model = mezzo.torch.prepare(nn.Linear(2, 2))
        >>> mezzo.torch.unprepare(model)
        >>> model.weight.dtype
        torch.float32
    """
    inner, optimizers = checked(model, optimizer, "unprepare")
    record = check_undo(inner, optimizers)
    warn_of_rounded(inner, "unprepare")
    named = list(inner.named_parameters())
    # By dtype, since a module may have been wrapped or renamed since; none was low before.
    low = {id(one): one.dtype for _, one in named if one.dtype is record.settings.dtype}
    with torch.no_grad():
        for name, parameter in named:
            if id(parameter) in low:
                _widen(parameter, record.dtypes.get(name, torch.float32))
        for name in record.buffers:
            path, _, last = name.rpartition(".")
            buffers = inner.get_submodule(path)._buffers
            stored = buffers[last]
            if stored is not None:
                buffers[last] = stored.to(record.dtypes.get(name, torch.float32))
    for each in optimizers:
        _give_back(each, record.settings.dtype, low)
        detach(each)
    unmark(inner)


@torch.no_grad()
def _give_back(optimizer: torch.optim.Optimizer, dtype: torch.dtype, low: dict[int, torch.dtype]) -> None:
    """Have an optimizer hold the model's parameters again.

    Args:
        optimizer: The optimizer.
        dtype: In which parameters were stored.
        low: Those that it held itself, by their identity, and the dtype that they had.
    """
    for group in optimizer.param_groups:
        for place, one in enumerate(group["params"]):
            if isinstance(one, Master):
                if one.model_param.dtype is dtype:  # of a module that has left the model
                    _widen(one.model_param, torch.float32)
                swap(optimizer, group, place, one.model_param)
            elif id(one) in low and one in optimizer.state:
                optimizer.state[one] = cast_state(optimizer.state[one], low[id(one)], one.dtype)


def _widen(parameter: Any, dtype: torch.dtype) -> None:
    master = master_of(parameter)
    low = parameter.detach()
    wide = low.to(dtype)
    if master is not None:
        take_over_writes(master, look=True)
        if master.owner.settings.keeps_masters:
            wide = master.values().to(dtype)
        elif master.compensation is not None:
            wide = (low.float() + master.compensation.float()).to(dtype)
        if master.unlink is not None:
            master.unlink()
    gradient: Tensor | None = parameter.grad
    replace_values(parameter, wide)
    if gradient is not None:
        set_gradient(parameter, gradient.to(dtype))
