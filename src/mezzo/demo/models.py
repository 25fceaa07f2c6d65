"""The two nets of the demo: convolutions over the image, attention over its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from mezzo.demo.arrays import CLASSES, SIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ConvNet(nn.Module):
    """Three 3 x 3 convolutions with batch norm, two poolings and a linear classifier."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(2 * width * (SIDE // 4) ** 2, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (samples, 1, 8, 8) to logits (samples, 10)."""
        logits: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return logits


class RowTransformer(nn.Module):
    """A transformer encoder that reads an image as a sequence of eight rows of eight pixels."""

    def __init__(self, width: int = 192, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(SIDE, width)
        self.position = nn.Parameter(torch.randn(SIDE, width) * 0.02)
        # Dropout 0: all precisions then see the very same computation, and no random numbers.
        self.encoder = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(SIDE * width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (samples, 1, 8, 8) to logits (samples, 10)."""
        rows = self.embed(images.squeeze(1)) + self.position
        logits: torch.Tensor = self.classifier(self.norm(self.encoder(rows)).flatten(1))
        return logits


MODELS: Mapping[str, Callable[[], nn.Module]] = {"conv net": ConvNet, "transformer": RowTransformer}


def build(name: str, seed: int) -> nn.Module:
    """Build a model on the CPU, with weights that depend on `seed` only.

    Args:
        name: A key of `MODELS`.
        seed: Seeds the initial weights; the global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name]()
