"""Watch a scaler: which steps were skipped, because of which parameters, and a schedule that counts real steps.

Run it with ``python examples/torch_scaler_watch.py``; it takes a few seconds.
"""

from __future__ import annotations

import math

import torch
from sklearn.datasets import load_digits
from torch import nn

import mezzo
from mezzo.torch import GradScaler, Overflow, SteppedScheduler, autocast


def report(overflow: Overflow) -> None:
    """Say what happened; the names are looked up here, and only because they are asked for."""
    print(f"  skipped at scale {overflow.scale:.0f}, {overflow.skipped_in_a_row} in a row; {overflow.parameters[0]}")


def main() -> None:
    """Train with a scale that is far too high, a batch that is broken, and then a net that is."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    scaler = GradScaler("cpu", init_scale=2.0**23, max_skipped=5, on_overflow=report)
    scaler.name_parameters(net)
    scheduler = SteppedScheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=10), scaler)

    def step(start: int, *, broken: bool = False) -> float:
        optimizer.zero_grad()
        batch = images[start : start + 50]
        with autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(batch * torch.nan if broken else batch), labels[start : start + 50])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()  # advances only if the optimizer stepped
        return loss.item()

    print("finding the scale:")
    losses, stepped = [], []
    for start in range(0, 1500, 50):
        losses.append(step(start))
        stepped.append(scaler.stepped(optimizer))
    print(f"{sum(stepped)} of {len(stepped)} steps made, {scaler.steps_taken(optimizer)} by the scaler's own count")
    print(f"scale {scaler.get_scale():.0f}, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    rate = scheduler.get_last_lr()[0]
    print(f"learning rate {rate:.4f}, lowered {math.log10(0.2 / rate):.0f} times: after each 10 steps that were made")

    print("one broken batch:")
    step(0, broken=True)
    print(f"  found_inf {scaler.found_inf(optimizer)}, stepped {scaler.stepped(optimizer)}")
    for parameter in scaler.nonfinite(optimizer):
        print(f"  {parameter}")

    step(0)  # a good one
    print("a net that stays broken:")
    with torch.no_grad():
        net[2].bias[0] = torch.nan
    try:
        while True:
            step(0)
    except mezzo.SkippedStepsError as error:
        print(f"  {error}")


if __name__ == "__main__":
    main()
