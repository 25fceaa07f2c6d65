"""Short ways to ask which parameters of a model are chosen, and why."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mezzo.torch.masters.low_parameters import choose

LOW = torch.bfloat16
WEIGHT = ("weight", "bias")
CELL = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
LAYER = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


def chosen(model: nn.Module, dtype: torch.dtype = LOW, policy: Any = None, low: Any = (), keep: Any = ()) -> list[str]:
    """Name what is to be stored low."""
    return [choice.name for choice in choose(model, dtype, policy, low, keep) if choice.low]


def reasons(model: nn.Module, policy: Any = None, low: Any = (), keep: Any = ()) -> dict[str, str]:
    """Give the reason for each parameter."""
    return {choice.name: choice.reason for choice in choose(model, LOW, policy, low, keep)}


def of(reason: str, *names: str) -> dict[str, str]:
    """Give several parameters one reason."""
    return dict.fromkeys(names, reason)
