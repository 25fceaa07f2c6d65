"""Train a small net in float16 with TensorPlay, with autocast and a loss scaler, and show why the scaler is there.

Run it with ``python examples/tensorplay_float16_scaler.py``; it takes a second.
"""

from __future__ import annotations

from typing import Any

import tensorplay as tp

from mezzo.tensorplay import GradScaler, autocast

STEPS = 200


def batch() -> tuple[Any, Any]:
    """Give inputs, and targets so small that float16 gradients of their loss underflow."""
    tp.manual_seed(0)
    x = tp.randn(64, 8)
    return x, (x[:, 0:1] * x[:, 1:2] + x[:, 2:3]).tanh() * 2.0**-12


def train(scaler: GradScaler) -> float:
    """Train a net, and say how much of the first loss is left."""
    x, y = batch()
    tp.manual_seed(1)
    model = tp.nn.Sequential(tp.nn.Linear(8, 32), tp.nn.ReLU(), tp.nn.Linear(32, 1))
    optimizer = tp.optim.Adam(model.named_parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with autocast("cpu", dtype=tp.float16):
            out = model(x)
        # The loss in float32: squares of what is so small are nothing in float16.
        loss = ((out.to(tp.float32) * 2.0**-12 - y) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    if scaler.is_enabled():
        skipped = STEPS - scaler.steps_taken(optimizer)
        print(f"with a scaler: {skipped} step(s) skipped, the scale is {scaler.get_scale():g}")
    return losses[-1] / losses[0]


def main() -> None:
    """Train twice, with and without the scaler."""
    with_scaler = train(GradScaler("cpu", growth_interval=50))
    without = train(GradScaler("cpu", enabled=False))
    print(f"left of the loss: less than a tenth with it: {with_scaler < 0.1}; without it: {without < 0.1}")


if __name__ == "__main__":
    main()
