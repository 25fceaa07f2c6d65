"""The logarithm of a probability that is 0 in float16: the loss is NaN after a dozen good steps.

The net computes its own cross entropy: softmax, log, the sum over the classes. Once it is sure of itself, the smallest
probabilities are below 3e-8, which is 0 in float16. log(0) is -Inf, and -Inf times 0 is NaN. In float32 the same net trains.

Run it with ``python examples/diagnose/log_of_zero.py``; it takes a few seconds. ``--dtype float32`` shows that the net is
sound, ``--cured`` sets the precision of the loss, and ``docs/diagnose.md`` tells how the place is found.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.torch import set_precision


class CrossEntropy(nn.Module):
    """Cross entropy, written by hand."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Give the mean over the batch."""
        probabilities = logits.softmax(-1)
        wanted = nn.functional.one_hot(labels, logits.shape[-1])
        return -(wanted * probabilities.log()).sum(-1).mean()


class Net(nn.Module):
    """Two layers that compute their loss as well."""

    def __init__(self) -> None:
        """Make the parts."""
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.loss = CrossEntropy()

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Give the logits of ten digits, and the loss."""
        logits = self.body(images)
        return logits, self.loss(logits, labels)


def train(dtype: torch.dtype, *, cured: bool) -> None:
    """Train for two epochs, as PyTorch's own recipe does it, and say how that went."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    net = Net()
    if cured:
        set_precision(net, {"loss": "fp32"})
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, enabled=dtype is torch.float16)
    good = 0
    for start in [*range(0, 1500, 50)] * 2:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            _, loss = net(images[start : start + 50], labels[start : start + 50])
        good += bool(loss.isfinite())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        right = net(images[1500:], labels[1500:])[0].argmax(-1) == labels[1500:]
    print(f"{good} of 60 losses finite, the last {loss.item():.4f}, accuracy {right.float().mean().item():.1%}")


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--cured", action="store_true")
    arguments = parser.parse_args()
    train(getattr(torch, arguments.dtype), cured=arguments.cured)


if __name__ == "__main__":
    main()
