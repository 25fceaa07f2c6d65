"""A variance that is too large for float16: no Inf in the loss, no NaN, no warning; the net only learns nothing.

The net normalizes by hand. The measurements it is fed are in small units, so their mix has a variance far beyond 65504,
where float16 ends: Inf. One over its root is 0, and so is what the layer gives, for nearly every patient. In float32 the
same net trains.

Run it with ``python examples/diagnose/variance.py``; it takes a few seconds. ``--dtype float32`` shows that the net is
sound, ``--cured`` sets the precision of the layer, and ``docs/diagnose.md`` tells how the place is found.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from mezzo.torch import set_precision


class Norm(nn.Module):
    """Layer normalization, written by hand."""

    def __init__(self, width: int) -> None:
        """Make the parameters."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Give each row mean 0 and variance 1."""
        variance = x.var(-1, keepdim=True, unbiased=False)
        x = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5)
        return x * self.weight + self.bias


class Net(nn.Module):
    """Two layers with a normalization between them."""

    def __init__(self, width: int = 64) -> None:
        """Make the parts."""
        super().__init__()
        self.mix = nn.Linear(30, width)
        self.norm = Norm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, measurements: Tensor) -> Tensor:
        """Give the logits of two diagnoses."""
        return self.head(self.norm(self.mix(measurements)).relu())


def train(dtype: torch.dtype, *, cured: bool) -> None:
    """Train for twelve epochs, as PyTorch's own recipe does it, and say how that went."""
    measurements, labels = load_breast_cancer(return_X_y=True)
    measurements, labels = torch.tensor(measurements * 10, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    net = Net()
    if cured:
        set_precision(net, {"norm": "fp32"})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    for start in [*range(0, 400, 50)] * 12:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = nn.functional.cross_entropy(net(measurements[start : start + 50]), labels[start : start + 50])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        right = net(measurements[400:]).argmax(-1) == labels[400:]
    print(f"loss {loss.item():.4f}, accuracy {right.float().mean().item():.1%}, scale {scaler.get_scale():.3g}")


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--cured", action="store_true")
    arguments = parser.parse_args()
    train(getattr(torch, arguments.dtype), cured=arguments.cured)


if __name__ == "__main__":
    main()
