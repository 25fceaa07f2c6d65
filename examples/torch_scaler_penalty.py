"""A gradient penalty under a scaler: the penalty is made of true gradients, and differentiated once more.

Run it with ``python examples/torch_scaler_penalty.py``; it takes a few seconds.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from mezzo.torch import GradScaler, autocast


def train(*, half: bool) -> tuple[list[float], list[float]]:
    """Train for one epoch of 30 steps with a penalty on the norm of the gradient.

    Args:
        half: Float16 and a scaler, or plain float32.

    Returns:
        The losses and the norms that the penalty is made of.
    """
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    scaler = GradScaler("cpu", init_scale=2.0**10, enabled=half)
    losses, norms = [], []
    for start in range(0, 1500, 50):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16, enabled=half):
            loss = nn.functional.cross_entropy(net(images[start : start + 50]), labels[start : start + 50])
        # The first backward pass is scaled too, or its float16 gradients underflow.
        scaled = torch.autograd.grad(scaler.scale(loss), list(net.parameters()), create_graph=True)
        # These are the caller's, not the optimizer's, so the caller unscales them.
        inverse = 1.0 / scaler.get_scale()
        gradients = [gradient * inverse for gradient in scaled]
        with autocast("cpu", dtype=torch.float16, enabled=half):
            norm = torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum().sqrt()
            total = loss + 0.1 * norm
        scaler.scale(total).backward()  # through the penalty: double backward
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


def main() -> None:
    """Compare with float32."""
    losses, norms = train(half=False)
    low_losses, low_norms = train(half=True)
    print(f"float32: loss {losses[0]:.4f} -> {losses[-1]:.4f}, norm {norms[0]:.4f} -> {norms[-1]:.4f}")
    print(f"float16: loss {low_losses[0]:.4f} -> {low_losses[-1]:.4f}, norm {low_norms[0]:.4f} -> {low_norms[-1]:.4f}")
    off = max(abs(low - exact) / exact for low, exact in zip(low_norms, norms, strict=True))
    print(f"penalties off by at most {off:.2%}, at most 2%: {off < 0.02}")


if __name__ == "__main__":
    main()
