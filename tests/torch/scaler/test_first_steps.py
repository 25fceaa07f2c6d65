"""A fused optimizer whose first step is skipped, as the first ones are while the scale is looked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.torch import GradScaler


def train(*, skips: int, fused: bool, **options: float | bool) -> torch.Tensor:
    """Fill the memory that an allocator hands out again, so that what nobody has written is seen."""
    weight = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9, fused=fused, foreach=False, **options)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for step in range(skips + 4):
        spoiled = [torch.full((1000,), 1e20) for _ in range(50)]
        del spoiled
        optimizer.zero_grad()
        scaler.scale((weight * (torch.inf if step < skips else 0.25 + step)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return weight.detach()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("skips", [0, 1, 3])
def test_fused_momentum_begins_at_zero(skips: int, nesterov: bool) -> None:
    torch.testing.assert_close(
        train(skips=skips, fused=True, nesterov=nesterov), train(skips=skips, fused=False, nesterov=nesterov)
    )


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad"])
def test_the_other_fused_optimizers_need_no_such_help(name: str) -> None:
    weight = nn.Parameter(torch.ones(10))
    optimizer = getattr(torch.optim, name)([weight], lr=0.5, fused=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    for factor in (torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    other = nn.Parameter(torch.ones(10))
    reference = getattr(torch.optim, name)([other], lr=0.5)
    other.sum().backward()
    reference.step()
    torch.testing.assert_close(weight, other)
