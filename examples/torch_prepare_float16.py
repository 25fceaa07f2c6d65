"""Float16 parameters with float32 masters and a gradient scaler, beside autocast; accumulation and an overflow included.

Run it with ``python examples/torch_prepare_float16.py``; it takes a few seconds.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.torch import GradScaler, autocast, master_params, prepare

BATCH, PARTS = 60, 2


def digits() -> tuple[Tensor, Tensor]:
    """Load 1797 handwritten digits, 8x8 pixels, shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]


def make_net() -> nn.Sequential:
    """Make a small net, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))


def train(*, prepared: bool) -> tuple[list[float], list[Tensor], GradScaler, torch.optim.Optimizer, nn.Sequential]:
    """Train for two epochs: the same loop with and without masters.

    Args:
        prepared: Store the parameters in float16.

    Returns:
        The losses, the float32 weights, the scaler, the optimizer and the net.
    """
    images, labels = digits()
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    if prepared:
        prepare(net, optimizer, dtype=torch.float16)
    # Too high on purpose: the first steps are skipped, and a skipped step leaves masters and weights alone.
    scaler = GradScaler("cpu", init_scale=2.0**20)
    losses = []
    for start in [*range(0, 1500, BATCH)] * 2:
        optimizer.zero_grad()
        total = 0.0
        for rows in torch.arange(start, start + BATCH).chunk(PARTS):
            with autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(net(images[rows]), labels[rows]) / PARTS
            scaler.scale(loss).backward()  # into float32 gradients
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
    return losses, [each.detach().clone() for each in master_params(optimizer)], scaler, optimizer, net


def accuracy(net: nn.Module) -> float:
    """Give the share of the held-out digits that are recognized."""
    images, labels = digits()
    with torch.no_grad(), autocast("cpu", dtype=torch.float16):
        right = net(images[1500:]).argmax(-1) == labels[1500:]
    return right.float().mean().item()


def main() -> None:
    """Compare with autocast over float32 weights."""
    results = {}
    for name, prepared in (("autocast", False), ("prepared", True)):
        losses, weights, scaler, optimizer, net = train(prepared=prepared)
        results[name] = (losses, weights)
        steps, scale = scaler.steps_taken(optimizer), scaler.get_scale()
        print(
            f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {steps} of {len(losses)} steps, scale {scale:.0f}, "
            f"accuracy {accuracy(net):.1%}, weights {net[0].weight.dtype}, gradients {net[0].weight.grad.dtype}"
        )
    (losses, weights), (others, masters) = results["autocast"], results["prepared"]
    equal = all(torch.equal(one, other) for one, other in zip(weights, masters, strict=True))
    print(f"same losses: {losses == others}, same float32 weights: {equal}")


if __name__ == "__main__":
    main()
