"""The float32 weights of a prepared model, as a state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .params import master_of, take_over_writes
from .preparation import warn_of_rounded

__all__ = ["float32_state_dict"]


def float32_state_dict(model: nn.Module) -> dict[str, Any]:
    """Give the model's state dict as it would be without `mezzo.torch.prepare`: in float32, with the masters' values.

    Args:
        model: The model, prepared or not, with or without an optimizer.

    Returns:
        What ``model.state_dict()`` gives, with every parameter that is stored low in float32: its master, or where there
        never was one what is stored. These are copies; the others are the model's own, as there. Where masters are gone with
        their optimizer, a warning says so.

    Example:
        >>> import mezzo.torch
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mezzo.torch.prepare(model, optimizer)
        >>> {name: str(value.dtype) for name, value in mezzo.torch.float32_state_dict(model).items()}
        {'weight': 'torch.float32', 'bias': 'torch.float32'}
    """
    warn_of_rounded(model, "float32_state_dict")
    found: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in found.items():
        if isinstance(value, Tensor):
            found[name] = _float32(value)
    return found


@torch.no_grad()
def _float32(value: Tensor) -> Tensor:
    master = master_of(value)
    if master is None:
        return value.detach().float() if value.dtype in (torch.bfloat16, torch.float16) else value.detach()
    take_over_writes(master, look=True)
    if master.owner.settings.keeps_masters:
        return master.values().clone()
    low = master.model_param.detach().float()
    return low if master.compensation is None else low + master.compensation.float()
