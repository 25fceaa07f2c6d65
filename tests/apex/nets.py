"""A small net and its training step, the same user code at every level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.apex import amp

LEVELS = ("O0", "O1", "O2", "O3")


def net() -> nn.Sequential:
    """Linear layers around a batch norm, the same numbers at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def batch(seed: int = 1, rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def start(level: str, *, optimizer: Callable[[nn.Module], Any] = sgd, **options: Any) -> tuple[nn.Module, Any]:
    """Initialize the net and an optimizer; a dynamic scale at every level unless another is asked for."""
    model = net()
    made: tuple[nn.Module, Any] = amp.initialize(
        model, optimizer(model), opt_level=level, **{"loss_scale": "dynamic", "verbosity": 0, **options}
    )
    return made


def loss_of(model: nn.Module, seed: int = 1) -> Tensor:
    inputs, labels = batch(seed)
    return nn.functional.cross_entropy(model(inputs), labels)


def backward(model: nn.Module, optimizer: Any, seed: int = 1, *, overflow: bool = False, **options: Any) -> None:
    """One block of ``scale_loss``; with an Inf put into a gradient at its end, if asked for."""
    with amp.scale_loss(loss_of(model, seed), optimizer, **options) as scaled:
        scaled.backward()
        if overflow:
            plant(optimizer)


def plant(optimizer: Any, value: float = torch.inf) -> None:
    """Put a value into the first gradient of an optimizer."""
    first = next(one for one in amp.master_params(optimizer) if one.grad is not None)
    assert first.grad is not None
    first.grad.flatten()[0] = value
    assert not first.grad.isfinite().all()


def gradients(optimizer: Any) -> list[Tensor]:
    return [one.grad.detach().clone() for one in amp.master_params(optimizer) if one.grad is not None]


def reference_gradients(*seeds: int) -> list[Tensor]:
    """The gradients in float32, without amp: the sum over batches."""
    model = net()
    for seed in seeds:
        loss_of(model, seed).backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


def state_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """All numbers that a step changes, as copies: weights, masters, the optimizer's state."""
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return [each.detach().clone() for each in (*model.parameters(), *amp.master_params(optimizer), *state)]


def scale(index: int = 0) -> float:
    return amp._amp_state.loss_scalers[index].loss_scale()


TOLERANCE = 2e-2
"""Half the digits of float16, in a sum over a batch of twelve; of the largest gradient."""


def close(found: list[Tensor], wanted: list[Tensor], tolerance: float = TOLERANCE) -> None:
    """Assert that gradients are near those in float32."""
    assert len(found) == len(wanted)
    largest = max(float(each.abs().max()) for each in wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.0, atol=tolerance * largest)
