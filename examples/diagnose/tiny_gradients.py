"""Gradients that are 0 in float16: the loss is finite, no step is skipped, and half of the net never learns.

The net names a digit and draws it again. The second loss is a mean over all pixels of a batch and has a small weight, so the
gradient of each pixel is below 3e-8, which is 0 in float16, and there is no gradient scaler. In float32 the same net learns
both.

Run it with ``python examples/diagnose/tiny_gradients.py``; it takes a few seconds. ``--dtype float32`` shows that the net is
sound, ``--cured`` scales the loss, and ``docs/diagnose.md`` tells how the place is found.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


class Net(nn.Module):
    """A net that names a digit and draws it, and gives the loss of both."""

    def __init__(self) -> None:
        """Make the parts."""
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)
        self.decoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.naming = nn.CrossEntropyLoss()
        self.drawing = nn.MSELoss()

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Give both losses."""
        seen = self.encoder(images)
        return self.naming(self.head(seen), labels), self.drawing(self.decoder(seen), images)


def train(dtype: torch.dtype, *, cured: bool) -> None:
    """Train for six epochs, and say how that went."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=cured and dtype is torch.float16)
    for start in [*range(0, 1500, 150)] * 6:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            naming, drawing = net(images[start : start + 150], labels[start : start + 150])
            loss = naming + 1e-4 * drawing
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    lost = sum(not parameter.grad.any() for parameter in net.decoder.parameters())
    print(
        f"naming {naming.item():.3f}, drawing {drawing.item():.4f}, decoder without gradients: {lost} of 4 parameters"
    )


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--cured", action="store_true")
    arguments = parser.parse_args()
    train(getattr(torch, arguments.dtype), cured=arguments.cured)


if __name__ == "__main__":
    main()
