"""How a program changes a weight: what training loops and users do, with values that do not depend on gradients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

__all__ = ["CHANGES", "change"]

CHANGES = ("add_", "copy_", "data", "load_state_dict", "SGD", "Adam fused", "SGD fused", "freeze", "learn")


def change(how: str, name: str, weights: Mapping[str, nn.Parameter]) -> None:
    """Change a weight.

    Args:
        how: One of `CHANGES`. ``"data"`` puts another tensor under it; ``"freeze"`` and ``"learn"`` change whether it
            requires gradients; the names of optimizers are a step of one.
        name: The weight.
        weights: All weights.
    """
    weight = weights[name]
    if how in ("freeze", "learn"):
        weight.requires_grad_(how == "learn")
        return
    if how in ("add_", "copy_"):
        with torch.no_grad():
            weight.add_(0.25) if how == "add_" else weight.copy_(_times(0.75, weight))
        return
    # A parameter cannot be given an inference tensor.
    with torch.inference_mode(False), torch.no_grad():
        if how == "data":
            weight.data = _times(-0.5, weight)
        elif how == "load_state_dict":
            module = nn.Module()
            module.register_parameter("weight", weight)
            module.load_state_dict({"weight": _times(1.5, weight)})
        else:
            _step(how, weight)


def _times(factor: float, weight: torch.Tensor) -> torch.Tensor:
    # By NumPy, for which there are no regions.
    return torch.from_numpy(weight.detach().numpy() * np.float32(factor))


def _step(how: str, weight: nn.Parameter) -> None:
    requires_grad = weight.requires_grad
    name, _, fused = how.partition(" ")
    optimizer = getattr(torch.optim, name)([weight], lr=0.125, fused=bool(fused))
    weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    weight.grad = None
    assert weight.requires_grad is requires_grad
