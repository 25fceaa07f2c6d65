"""Train a digits classifier on the CPU: float32, bfloat16 under TensorPlay's own autocast, bfloat16 under mezzo's.

Run it with ``python examples/tensorplay_train_cpu.py``; it takes some seconds.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorplay
from sklearn.datasets import load_digits
from tensorplay import nn, optim

from mezzo.tensorplay import autocast

Data = list[tuple[Any, Any]]


def digits() -> tuple[Data, Any, Any]:
    """Give batches of 100 to train on, and 297 images with labels to test."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    inputs = tensorplay.from_numpy((images[order] / 16).astype(np.float32))
    targets = tensorplay.from_numpy(labels[order].astype(np.int64))
    data = [(inputs[at : at + 100], targets[at : at + 100]) for at in range(0, 1500, 100)]
    return data, inputs[1500:], targets[1500:]


def train(region: Any, data: Data) -> tuple[Any, float]:
    """Train for five epochs, each forward pass and loss in a region that ``region`` opens."""
    tensorplay.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    loss_fn = nn.CrossEntropyLoss()
    for _ in range(5):
        for batch, target in data:
            optimizer.zero_grad()
            # Runs the forward pass with autocasting.
            with region():
                output = model(batch)
                loss = loss_fn(output, target)
            loss.backward()
            optimizer.step()
    return model, loss.item()


def main() -> None:
    """Compare."""
    data, images, labels = digits()
    bfloat16 = {"device_type": "cpu", "dtype": tensorplay.bfloat16}
    regions = {
        "float32": nullcontext,
        "bfloat16, TensorPlay's own": lambda: tensorplay.autocast(**bfloat16),
        "bfloat16, mezzo's": lambda: autocast(**bfloat16),
    }
    for name, region in regions.items():
        model, loss = train(region, data)
        with tensorplay.no_grad(), region():
            right = model(images).argmax(-1) == labels
        print(f"{name:<26} last loss {loss:.4f}, accuracy {right.to(tensorplay.float32).mean().item():.1%}")


if __name__ == "__main__":
    main()
