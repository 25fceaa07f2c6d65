"""A model with the names that models have, for the tests of `set_precision`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.torch import active_policy, autocast

LOW = torch.bfloat16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out_proj = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.mT).softmax(-1)
        self.seen.append(weights.dtype)
        return self.out_proj(weights @ v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(8, 10, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


TOKENS = torch.arange(6).reshape(2, 3)


def output(model: nn.Module, *args: Tensor, policy: Any = None) -> Tensor:
    with autocast("cpu", dtype=LOW, policy=policy):
        return model(*(args or (TOKENS,)))


class Seen(nn.Module):
    """Notes what arrives and under which policy; computes one product in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.args: Any = None
        self.kwargs: Any = None
        self.policy = ""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.args, self.kwargs = args, kwargs
        self.policy = active_policy("cpu").name
        return F.linear(self.weight.detach(), self.weight)
