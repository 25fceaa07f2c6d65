"""Small nets that learn scikit-learn's digits, in float32 or in a region, with the same seeds and the same order of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import tensorplay as tp
import tensorplay.nn.functional as F
from sklearn.datasets import load_digits
from tensorplay import nn

TRAINED = 1200  # of 1797 digits; the other 597 are for the test, so 1 % is six of them
BATCH = 60


@dataclass(frozen=True)
class Recipe:
    """How a net is trained.

    Args:
        net: the class of the net.
        optimizer: the name of an optimizer of ``tensorplay.optim``.
        options: names and values of its other arguments, such as the learning rate.
        epochs: how often all of the training digits are seen.
    """

    net: type[nn.Module]
    optimizer: str
    options: tuple[tuple[str, float], ...]
    epochs: int


@dataclass
class Trained:
    """What came of it: accuracy on the digits not trained on, last loss, and what dtype each module gave."""

    accuracy: float
    loss: float
    dtypes: dict[str, Any]
    scales: list[float] = field(default_factory=list)


class Transformer(nn.Module):
    """Reads a digit as eight rows of eight pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.places = nn.Parameter(tp.randn(8, 32) * 0.1)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(256, 10)

    def forward(self, images: Any) -> Any:
        tokens = self.layer(self.embed(images.squeeze(1)) + self.places)
        # Not the mean of the tokens: layer_norm's backward gives NaN where its gradient is expanded, in float32 too.
        return self.head(self.norm(tokens).flatten(1))


class ConvNet(nn.Module):
    """Two convolutions with batch norm and max-pool, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Any) -> Any:
        x = F.max_pool2d(F.relu(self.first_norm(self.first(images))), 2)
        x = F.max_pool2d(F.relu(self.second_norm(self.second(x))), 2)
        return self.head(x.flatten(1))


@cache
def digits() -> tuple[Any, Any]:
    """Give the images, (1797, 1, 8, 8) float32 between -1 and 1, and the classes, in a fixed mixed order."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images[order, None] / 8 - 1).astype(np.float32)
    return tp.from_numpy(images), tp.from_numpy(found.target[order].astype(np.int64))


def batches(epochs: int) -> Iterator[tuple[Any, Any]]:
    images, classes = digits()
    order = np.random.default_rng(1)
    for _ in range(epochs):
        mixed = order.permutation(TRAINED)
        for start in range(0, TRAINED, BATCH):
            chosen = tp.from_numpy(mixed[start : start + BATCH].astype(np.int64))
            yield images[chosen], classes[chosen]


def watch(net: nn.Module) -> dict[str, Any]:
    """Keep the dtype of what each named module of a net gives, by forward hooks."""
    dtypes: dict[str, Any] = {}
    for name, module in net.named_modules():

        def keep(_module: Any, _inputs: Any, result: Any, name: str = name) -> None:
            dtypes[name] = (result[0] if isinstance(result, tuple) else result).dtype

        module.register_forward_hook(keep)
    return dtypes


def train(recipe: Recipe, region: Any, scaler: Any = None) -> Trained:
    """Train a net; each forward pass and its loss run in ``region``, a function that makes one.

    Args:
        recipe: the net and how it is trained.
        region: a function without arguments that gives a new region.
        scaler: a ``GradScaler``, or None.

    Returns:
        What came of it; the accuracy is that of the net inside a region.
    """
    tp.manual_seed(0)
    net = recipe.net()
    dtypes = watch(net)
    stepper = getattr(tp.optim, recipe.optimizer)(net.parameters(), **dict(recipe.options))
    scales = []
    for images, classes in batches(recipe.epochs):
        stepper.zero_grad()
        with region():
            loss = F.cross_entropy(net(images), classes)
        if scaler is None:
            loss.backward()
            stepper.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(stepper)
            scaler.update()
            scales.append(scaler.get_scale())
    return Trained(accuracy(net, region), loss.item(), dtypes, scales)


def accuracy(net: nn.Module, region: Any) -> float:
    images, classes = digits()
    net.eval()
    with tp.no_grad(), region():
        answers = net(images[TRAINED:]).argmax(1)
    return float((answers == classes[TRAINED:]).float().mean().item())
