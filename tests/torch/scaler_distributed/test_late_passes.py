"""A scaled backward pass after `unscale_`, where the gradients are written by hooks and callbacks of DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.torch import GradScaler

from .processes import Ranks
from .training import NUMBERS, assert_same, batch, build, mean_square, values

pytestmark = pytest.mark.slow  # the first one waits for the processes


def train_late(wrap: Callable[[nn.Module], nn.Module], scaler: GradScaler) -> dict[str, Any]:
    """Unscale between two backward passes; the gradients are to be those of the sum."""
    model = build()
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(mean_square(wrapped, batch(step))).backward()
        scaler.unscale_(optimizer)
        scaler.scale(mean_square(wrapped, batch(step + 10))).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"scale": [scaler.get_scale()], "tracker": [scaler._get_growth_tracker()], "parameters": values(model)}


def late_ddp(rank: int) -> dict[str, Any]:
    return train_late(nn.parallel.DistributedDataParallel, GradScaler("cpu", **NUMBERS))


def late_fsdp(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    return train_late(lambda model: fully_shard(model, mesh=mesh), GradScaler("cpu", **NUMBERS))


CHECKS = [late_ddp, late_fsdp]


@pytest.mark.parametrize("check", ["late_ddp", "late_fsdp"])
def test_what_a_late_pass_adds_is_unscaled(ranks: Ranks, check: str) -> None:
    plain = train_late(lambda model: model, GradScaler("cpu", enabled=False))
    # Both ranks have all the data, so that an average is what each has.
    torch.testing.assert_close(assert_same(ranks[check])["parameters"], plain["parameters"])
