"""A transformer of six layers, written by hand and sound in every dtype: the tests plant faults in it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

WIDTH = 16
PADDING = 0
"""The token whose embedding is 0."""

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, PADDING, PADDING]])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return self.out(self.weights(query, key) @ value)  # fault: broken weight

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.transpose(-2, -1) / math.sqrt(WIDTH)
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(ahead, -math.inf).softmax(-1)  # on purpose: no row is masked wholly


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act: nn.Module = nn.GELU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm: nn.Module = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp: nn.Module = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Predicts the next token, and gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH, padding_idx=PADDING)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).to(torch.get_autocast_dtype("cpu"))  # so that the residual stream is low too
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return self.loss(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())  # fault: scale too large
