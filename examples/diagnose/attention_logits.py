"""Attention logits that are too large for float16: the loss is NaN, and the scaler skips every step.

The images are bytes, from 0 to 255, and nobody divides them by 255. Queries times keys then go far beyond 65504, where
float16 ends: Inf, and softmax makes NaN of it. In float32 the same net trains.

Run it with ``python examples/diagnose/attention_logits.py``; it takes a few seconds. ``--dtype float32`` shows that the net
is sound, ``--cured`` sets the precision of the attention, and ``docs/diagnose.md`` tells how the place is found.
"""

from __future__ import annotations

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.torch import set_precision


class Attention(nn.Module):
    """Attention with one head, written by hand."""

    def __init__(self, width: int) -> None:
        """Make the projections."""
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Let each row of an image look at the others."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return self.out(scores.softmax(-1) @ value)


class Net(nn.Module):
    """The rows of an image as a sequence."""

    def __init__(self, width: int = 256) -> None:
        """Make the parts."""
        super().__init__()
        self.rows = nn.Linear(8, width)
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(8 * width)
        self.head = nn.Linear(8 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Give the logits of ten digits."""
        x = self.rows(images)
        x = x + self.attention(x)
        return self.head(self.norm(x.flatten(1)))


def train(dtype: torch.dtype, *, cured: bool) -> None:
    """Train for one epoch, as PyTorch's own recipe does it, and say how that went."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images * 255 / 16, dtype=torch.float32).view(-1, 8, 8), torch.tensor(labels)
    torch.manual_seed(0)
    net = Net()
    if cured:
        set_precision(net, {"attention": "fp32"})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    for start in range(0, 1500, 50):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = nn.functional.cross_entropy(net(images[start : start + 50]), labels[start : start + 50])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        right = net(images[1500:]).argmax(-1) == labels[1500:]
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
