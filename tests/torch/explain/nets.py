"""Small nets and steps that the tests of `explain` share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mezzo.report import OpRecord, Report
from mezzo.torch import autocast


class Block(nn.Module):
    """A layer of a transformer, in plain ops."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return x + self.out(scores.softmax(-1) @ v)


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(width), Block(width)]), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> Tensor:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))


def loss_of(model: Callable[[Tensor], Tensor], low: torch.dtype = torch.bfloat16) -> Tensor:
    with autocast("cpu", dtype=low):
        return model(batch()).float().square().sum()


def forward(report: Report, op: str = "") -> list[OpRecord]:
    """Give the records of the forward pass, of one op if it is named."""
    return [record for record in report.records if record.phase == "forward" and op in ("", record.op)]


def only(records: list[OpRecord]) -> OpRecord:
    assert len(records) == 1, [(record.op, record.path) for record in records]
    return records[0]
