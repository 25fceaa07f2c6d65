"""Accumulate gradients over micro-batches: the page's way, and with an optimizer that steps inside of the window.

Run it with ``python examples/torch_scaler_accumulation.py``; it takes a few seconds.
"""

from __future__ import annotations

import contextlib

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.torch import GradScaler, autocast

BATCH = 200


def digits() -> tuple[Tensor, Tensor]:
    """Load 1797 handwritten digits, 8x8 pixels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def make_net() -> nn.Sequential:
    """Make a small net, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(parts: int, *, half: bool) -> tuple[float, Tensor]:
    """Train for three epochs with batches of 200.

    Args:
        parts: In how many micro-batches a batch is taken.
        half: Float16 and a scaler, or plain float32.

    Returns:
        The loss over the last batch and all parameters.
    """
    images, labels = digits()
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=5, enabled=half)
    size = BATCH // parts
    total = 0.0
    for start in [*range(0, 1600, size)] * 3:
        with autocast("cpu", dtype=torch.float16, enabled=half):
            loss = nn.functional.cross_entropy(net(images[start : start + size]), labels[start : start + size])
            share = loss / parts  # the sum of the shares is the mean over the batch
        scaler.scale(share).backward()
        total = share.item() + (0.0 if start % BATCH == 0 else total)
        if (start + size) % BATCH == 0:  # the batch is complete: the scale was the same for all of it
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return total, torch.cat([p.detach().flatten() for p in net.parameters()])


def two_windows(*, accumulate: bool) -> float:
    """Step the head after each micro-batch and the body after four: `update` falls into the body's window.

    Args:
        accumulate: Keep the scale inside of the window.

    Returns:
        How far the body's gradient is off from float32's, as a share of it.
    """
    images, labels = digits()
    net, twin = make_net(), make_net()
    body, head = (torch.optim.SGD(net[index].parameters(), lr=0.0) for index in (0, 2))
    # It grows after each two good steps of the head, so it wants to grow in the middle of the body's window.
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    with scaler.accumulate() if accumulate else contextlib.nullcontext():
        for start in range(0, 200, 50):
            rows = slice(start, start + 50)
            with autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(net(images[rows]), labels[rows])
            scaler.scale(loss).backward()
            nn.functional.cross_entropy(twin(images[rows]), labels[rows]).backward()
            scaler.step(head)
            if start < 150:
                scaler.update()
            head.zero_grad()
    scaler.unscale_(body)
    exact = twin[0].weight.grad
    return ((net[0].weight.grad - exact).norm() / exact.norm()).item()


def main() -> None:
    """Compare micro-batches with whole batches, and show what a scale that moves in a window does."""
    whole_loss, whole = train(1, half=False)
    for parts in (1, 4):
        loss, parameters = train(parts, half=True)
        off = (parameters - whole).abs().max()
        print(
            f"float16, {parts} x {BATCH // parts}: loss {loss:.4f}, parameters off by {off:.4f}"
            f" from float32 in whole batches, at most 0.02: {off < 0.02}"
        )
    print(f"float32, 1 x {BATCH}: loss {whole_loss:.4f}")
    print("an optimizer that steps inside of another's window:")
    for accumulate in (False, True):
        name = "inside of accumulate()" if accumulate else "the scale moves"
        print(f"  {name}: the other's gradient is off by {two_windows(accumulate=accumulate):.1%}")


if __name__ == "__main__":
    main()
