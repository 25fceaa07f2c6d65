"""Steer a trainer that calls ``torch.autocast`` itself, without touching it: the process-wide default policy.

Run it with ``python examples/torch_steer_trainer.py``; it takes a few seconds.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from mezzo.torch import observe, set_default_policy


def somebody_elses_trainer(steps: int = 60) -> float:
    """Stand for a library: it knows nothing of mezzo and opens PyTorch's region itself.

    Args:
        steps: How many steps to train.

    Returns:
        The last loss.
    """
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 10), nn.LogSoftmax(-1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for step in range(steps):
        rows = torch.arange(step * 25, step * 25 + 25)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.nll_loss(net(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Train under each policy; the trainer stays the same."""
    for policy in ("torch", "unified", "fp32"):
        set_default_policy(policy)
        with observe("cpu") as seen:
            somebody_elses_trainer(steps=1)
        softmax = [call.output_dtype for call in seen.calls if "log_softmax" in call.op]
        ran = ", ".join(f"{count} ops in {dtype}" for dtype, count in sorted(seen.by_dtype().items()))
        loss = somebody_elses_trainer()
        print(f"{policy:<8} last loss {loss:.4f}; in one step {ran}; log_softmax {softmax or 'unlisted'}")
    set_default_policy("torch")


if __name__ == "__main__":
    main()
