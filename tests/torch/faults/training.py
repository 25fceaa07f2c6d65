"""Training steps whose gradients a test chooses: the loss is a sum of parameters times slopes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

INF, NAN = float("inf"), float("nan")


def weight(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Make a parameter of these values."""
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def plain(parameters: Iterable[Tensor], **options: Any) -> SGD:
    """Make an optimizer that takes a gradient away as it is: its steps show what gradients it was given."""
    return SGD(parameters, lr=1.0, **options)


def parameters_of(*optimizers: Optimizer) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def backward(scaler: Any, parameters: Iterable[Tensor], slope: float | Tensor) -> None:
    """Add the slope to the gradient of each parameter, by way of a scaled loss."""
    scaler.scale(torch.stack([(p * slope).sum() for p in parameters]).sum()).backward()


def iterate(scaler: Any, optimizer: Optimizer, slope: float | Tensor = 1.0, times: int = 1) -> None:
    """Make one whole iteration, or some."""
    for _ in range(times):
        optimizer.zero_grad()
        backward(scaler, parameters_of(optimizer), slope)
        scaler.step(optimizer)
        scaler.update()


def layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def spoil(net: nn.Module, name: str, places: list[float]) -> None:
    """Put these values at the start of a parameter's gradient."""
    grad = net.get_parameter(name).grad
    assert grad is not None
    grad.view(-1)[: len(places)] = torch.tensor(places, dtype=grad.dtype)


def spoiled_iteration(scaler: Any, net: nn.Sequential, optimizer: Any, spoiled: dict[str, list[float]]) -> None:
    optimizer.zero_grad()
    scaler.scale(net(torch.ones(2, net[0].in_features)).sum()).backward()
    for name, places in spoiled.items():
        spoil(net, name, places)
    scaler.step(optimizer)
    scaler.update()
