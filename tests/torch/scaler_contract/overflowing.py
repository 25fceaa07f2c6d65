"""A small model and iterations of it whose gradients overflow where a test wants them to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

INF, NAN = float("inf"), float("nan")


def net() -> nn.Sequential:
    """Two layers: parameters ``0.weight`` (3 x 2), ``0.bias`` (3), ``2.weight`` (1 x 3) and ``2.bias`` (1)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def backward(scaler: torch.amp.GradScaler, model: nn.Module, bad: Mapping[str, list[float]] | None = None) -> None:
    """Scaled gradients for all parameters.

    Args:
        scaler: What scales the loss.
        model: Whose gradients are set, and added to where there are any.
        bad: For a parameter's name, the values that the first elements of its gradient get.
    """
    scaler.scale(model(torch.ones(4, 2)).square().mean()).backward()
    parameters = dict(model.named_parameters())
    for name, values in (bad or {}).items():
        parameters[name].grad.view(-1)[: len(values)] = torch.tensor(values)


def iterate(
    scaler: torch.amp.GradScaler,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    bad: Mapping[str, list[float]] | None = None,
) -> None:
    """One iteration as the documentation has it."""
    optimizer.zero_grad()
    backward(scaler, model, bad)
    scaler.step(optimizer)
    scaler.update()
