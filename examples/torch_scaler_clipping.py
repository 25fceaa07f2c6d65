"""Clip gradients under a scaler: three ways that give float32's norms, and the one that does not.

Run it with ``python examples/torch_scaler_clipping.py``; it takes a few seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.torch import GradScaler, autocast

MAX_NORM = 0.5
Clip = Callable[[GradScaler, torch.optim.Optimizer, nn.Module], Tensor]


def by_hand(scaler: GradScaler, optimizer: torch.optim.Optimizer, net: nn.Module) -> Tensor:
    """Unscale first, then clip with PyTorch's function: the way of PyTorch's page."""
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)


def by_the_scaler(scaler: GradScaler, _optimizer: torch.optim.Optimizer, net: nn.Module) -> Tensor:
    """Let the scaler clip: it knows that these gradients are still scaled."""
    return scaler.clip_grad_norm_(net.parameters(), MAX_NORM)


def both(scaler: GradScaler, optimizer: torch.optim.Optimizer, net: nn.Module) -> Tensor:
    """Unscale, and let the scaler clip: it knows that they are not scaled any more."""
    scaler.unscale_(optimizer)
    return scaler.clip_grad_norm_(net.parameters(), MAX_NORM)


def too_early(_scaler: GradScaler, _optimizer: torch.optim.Optimizer, net: nn.Module) -> Tensor:
    """Clip gradients that are still scaled: the mistake. Every step becomes tiny, and nothing says so."""
    return nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)


def train(clip: Clip, *, half: bool) -> tuple[Tensor, Tensor]:
    """Train for one epoch of 30 steps.

    Args:
        clip: How to clip.
        half: Float16 and a scaler, or plain float32.

    Returns:
        The norms before clipping, and the largest after it, as the optimizer saw them.
    """
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    scaler = GradScaler("cpu", init_scale=2.0**10, enabled=half)
    before, after = [], []
    # What the optimizer steps with, whoever scaled and clipped it.
    optimizer.register_step_pre_hook(
        lambda *_: after.append(nn.utils.get_total_norm([p.grad for p in net.parameters()]))
    )
    for start in range(0, 1500, 50):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16, enabled=half):
            loss = nn.functional.cross_entropy(net(images[start : start + 50]), labels[start : start + 50])
        scaler.scale(loss).backward()
        before.append(clip(scaler, optimizer, net))
        scaler.step(optimizer)
        scaler.update()
    return torch.stack(before), torch.stack(after).max()


def main() -> None:
    """Compare the norms of all 30 steps with those of float32."""
    exact, largest = train(by_the_scaler, half=False)  # a scaler that is switched off clips plainly
    print(f"float32: norms from {exact.min():.3f} to {exact.max():.3f}, clipped to {largest:.3f}")
    for clip in (by_hand, by_the_scaler, both):
        norms, largest = train(clip, half=True)
        off = ((norms - exact) / exact).abs().max()
        name = clip.__name__.replace("_", " ")
        print(f"{name}: largest norm in a step {largest:.3f}, off from float32 by {off:.1%}, at most 2%: {off < 0.02}")
    norms, largest = train(too_early, half=True)
    print(f"too early: norms up to {norms.max():.0f}, largest norm in a step {largest:.1e}: no training")


if __name__ == "__main__":
    main()
