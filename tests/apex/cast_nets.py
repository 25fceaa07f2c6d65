"""Models, optimizers and steps for the tests of what `amp.initialize` casts."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.apex.amp.models import cast_models
from mezzo.apex.amp.properties import resolve

HALF, LOW, FULL, WIDE = torch.float16, torch.bfloat16, torch.float32, torch.float64
LOWS = [HALF, LOW]


def initialize(
    models: Any, optimizers: Any = (), level: str = "O2", outputs: torch.dtype | None = None, **overrides: Any
) -> None:
    dtype = overrides.pop("dtype", None)
    as_lists = [each if isinstance(each, list | tuple) else [each] for each in (models, optimizers)]
    cast_models(*as_lists, resolve(level, overrides, dtype)[1], outputs)


class Net(nn.Module):
    """Has one of each kind whose dtype the levels decide about."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 1)
        self.batch = nn.BatchNorm1d(4)
        self.plain = nn.BatchNorm1d(4, affine=False)
        self.instance = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.group = nn.GroupNorm(2, 4)
        self.layer = nn.LayerNorm(3)
        self.linear = nn.Linear(3, 3)
        self.wide: Tensor
        self.register_buffer("wide", torch.ones(3, dtype=WIDE))
        self.register_buffer("count", torch.ones(3, dtype=torch.int64))
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.group(self.instance(self.plain(self.batch(self.conv(x)))))
        return self.linear(self.layer(x)) * self.wide


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(*models: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(itertools.chain(*(model.parameters() for model in models)), lr=lr)


def adam(*models: nn.Module, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(itertools.chain(*(model.parameters() for model in models)), **{"lr": 1e-3, **options})


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    out = model(torch.rand(8, 4, generator=generator))
    out.square().mean().backward()
    optimizer.step()
    return out.detach()
