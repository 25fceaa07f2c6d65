"""Train in float16 with gradient scaling: the loop of PyTorch's page, on a CPU, beside float32.

Run it with ``python examples/torch_scaler_typical.py``; it takes a few seconds. It also puts each half of mezzo beside
PyTorch's other half: they go together, and either goes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mezzo.torch


def digits() -> tuple[Tensor, Tensor]:
    """Load 1797 handwritten digits, 8x8 pixels, shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]


def make_net() -> nn.Module:
    """Make a small net, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(region: Any, scaler: torch.amp.GradScaler) -> tuple[float, float, nn.Module]:
    """Train for two epochs.

    Args:
        region: An autocast region, entered for each forward pass.
        scaler: mezzo's scaler or PyTorch's, enabled or not; the loop is the same.

    Returns:
        The first loss, the last one, and the net.
    """
    images, labels = digits()
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        for start in range(0, 1500, 50):
            optimizer.zero_grad()
            with region:
                loss = nn.functional.cross_entropy(net(images[start : start + 50]), labels[start : start + 50])
            scaler.scale(loss).backward()  # gradients of loss * scale
            scaler.step(optimizer)  # unscales them; steps if all are finite
            scaler.update()  # moves the scale
            losses.append(loss.item())
    return losses[0], losses[-1], net


def main() -> None:
    """Train in float32, then in float16 with each mixture of halves."""
    half = {"dtype": torch.float16}
    start = {"init_scale": 2.0**20}  # too high on purpose, so that the first steps are skipped and the scale is found
    scaler = mezzo.torch.GradScaler("cpu", **start)
    runs = {
        "float32": (mezzo.torch.autocast("cpu", enabled=False), mezzo.torch.GradScaler("cpu", enabled=False)),
        "mezzo's two halves": (mezzo.torch.autocast("cpu", **half), scaler),
        "mezzo's scaler, torch.autocast": (torch.autocast("cpu", **half), mezzo.torch.GradScaler("cpu", **start)),
        "torch.amp.GradScaler, mezzo's autocast": (
            mezzo.torch.autocast("cpu", **half),
            torch.amp.GradScaler("cpu", **start),
        ),
        "mezzo's scaler, no autocast": (mezzo.torch.autocast("cpu", enabled=False), mezzo.torch.GradScaler("cpu")),
        "mezzo's autocast, no scaler": (
            mezzo.torch.autocast("cpu", **half),
            mezzo.torch.GradScaler("cpu", enabled=False),
        ),
    }
    nets = {}
    for name, (region, its_scaler) in runs.items():
        first, last, nets[name] = train(region, its_scaler)
        print(f"{name:<40} loss {first:.4f} -> {last:.4f}, scale {its_scaler.get_scale():.0f}")

    pairs = zip(nets["float32"].parameters(), nets["mezzo's scaler, no autocast"].parameters(), strict=True)
    print(f"scaling alone leaves float32 training as it is: {all(torch.equal(a, b) for a, b in pairs)}")


if __name__ == "__main__":
    main()
