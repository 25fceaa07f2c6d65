"""Several models, losses and optimizers with one scaler: each optimizer is judged alone, the scale moves once.

Run it with ``python examples/torch_scaler_several_models.py``; it takes a few seconds.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.torch import GradScaler, autocast


def digits() -> tuple[Tensor, Tensor]:
    """Load 1797 handwritten digits, 8x8 pixels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def train(*, half: bool, break_at: int | None = None) -> tuple[list[float], list[float], list[int], float]:
    """Train a classifier and an autoencoder whose losses mix, as PyTorch's page does.

    Args:
        half: Float16 and a scaler, or plain float32.
        break_at: In which step to put an Inf into a gradient of the autoencoder.

    Returns:
        Both losses of the first and of the last step, the steps that each optimizer made, and the last scale.
    """
    images, labels = digits()
    torch.manual_seed(0)
    classifier = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    autoencoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64))
    first = torch.optim.SGD(classifier.parameters(), lr=0.2)
    second = torch.optim.Adam(autoencoder.parameters(), lr=0.003)
    scaler = GradScaler("cpu", init_scale=2.0**12, enabled=half)
    losses = []
    for step, start in enumerate(range(0, 1500, 50)):
        rows = slice(start, start + 50)
        first.zero_grad()
        second.zero_grad()
        with autocast("cpu", dtype=torch.float16, enabled=half):
            rebuilt = autoencoder(images[rows])
            recognition = nn.functional.cross_entropy(classifier(images[rows]), labels[rows])
            likeness = nn.functional.mse_loss(rebuilt, images[rows])
            loss_of_first = recognition + 0.1 * likeness
            loss_of_second = likeness + 0.01 * nn.functional.cross_entropy(classifier(rebuilt), labels[rows])
        # One graph, two losses: retain_graph belongs to that, not to scaling.
        scaler.scale(loss_of_first).backward(retain_graph=True)
        scaler.scale(loss_of_second).backward()
        if step == break_at:
            autoencoder[0].weight.grad[0, 0] = torch.inf
        # Any of them may be unscaled, to look at or change its gradients; the other is unscaled in step.
        scaler.unscale_(first)
        scaler.step(first)
        scaler.step(second)
        scaler.update()  # once, for both
        losses.append((recognition.item(), likeness.item()))
    taken = [scaler.steps_taken(optimizer) for optimizer in (first, second)] if half else [step + 1] * 2
    return list(losses[0]), list(losses[-1]), taken, scaler.get_scale()


def main() -> None:
    """Train in float32, in float16, and in float16 with one bad gradient."""
    for name, half, break_at in (("float32", False, None), ("float16", True, None), ("float16, Inf", True, 3)):
        before, after, taken, scale = train(half=half, break_at=break_at)
        falls = ", ".join(f"{a:.4f} -> {b:.4f}" for a, b in zip(before, after, strict=True))
        print(f"{name:<13} losses {falls}; steps made {taken[0]} and {taken[1]}, scale {scale:.0f}")


if __name__ == "__main__":
    main()
