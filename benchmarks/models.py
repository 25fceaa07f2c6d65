"""The models that are timed, each with an input for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def blocks() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)]
    return nn.Sequential(*layers), torch.randn(8, 64)


def encoder(batch: int, length: int) -> tuple[nn.Module, Tensor]:
    # No dropout: drawing random numbers costs both sides the same and only blurs the ratio.
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return model, torch.randn(batch, length, 768)
