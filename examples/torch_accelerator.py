"""Put AMP on an accelerator that is plugged into PyTorch, from Python, in one call; then train on it.

Run it with ``python examples/torch_accelerator.py``; it takes a few seconds. The accelerator here is a stand-in (see
``standin_backend.py``) that notes in which dtype it computed; with a real one, import its package instead.
"""

from __future__ import annotations

from typing import Any

import standin_backend  # a real backend is a package of its own; importing it puts torch.<name> in place
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mezzo.torch

DEVICE = standin_backend.NAME
OPS = {"addmm": "Linear", "gelu": "GELU", "native_layer_norm": "LayerNorm", "nll_loss_forward": "loss"}


def digits() -> tuple[Tensor, Tensor]:
    """Load 1797 handwritten digits, 8x8 pixels, shuffled, onto the device."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16, dtype=torch.float32)[order].to(DEVICE), torch.tensor(labels)[order].to(DEVICE)


def train(region: Any, scaler: Any) -> str:
    """Train a small net for two epochs, as on any device.

    Args:
        region: An autocast region, entered for each forward pass.
        scaler: A gradient scaler, enabled or not.

    Returns:
        The first and the last loss, and the dtypes in which the device computed the last forward pass.
    """
    images, labels = digits()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        for start in range(0, 1500, 50):
            optimizer.zero_grad()
            with standin_backend.calls() as ran, region:
                loss = nn.functional.cross_entropy(net(images[start : start + 50]), labels[start : start + 50])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    dtypes = {OPS[call.op]: call.output for call in ran if call.op in OPS}
    columns = "".join(f"{str(dtypes[op]).removeprefix('torch.'):>11}" for op in OPS.values())
    return f"{losses[0]:.4f} -> {losses[-1]:.4f}{columns}"


def main() -> None:
    """Give AMP to the device, train in three precisions, then change one rule."""
    # This is all. What it takes in C++: a list of dtypes, a fallback, a kernel for each op that is cast, two for the scaler.
    mezzo.torch.register_accelerator(DEVICE, dtypes=[torch.float16, torch.bfloat16])

    off = mezzo.torch.GradScaler(DEVICE, enabled=False)
    runs = {
        "float32": (mezzo.torch.autocast(DEVICE, enabled=False), off),
        "bfloat16": (mezzo.torch.autocast(DEVICE, dtype=torch.bfloat16), off),
        "float16, scaled": (mezzo.torch.autocast(DEVICE, dtype=torch.float16), mezzo.torch.GradScaler(DEVICE)),
        "the same, of PyTorch": (torch.autocast(DEVICE, dtype=torch.float16), torch.amp.GradScaler(DEVICE)),
    }
    print(f"{'on ' + DEVICE:<22}{'loss':<16}" + "".join(f"{name:>11}" for name in OPS.values()))
    for name, (region, scaler) in runs.items():
        print(f"{name:<22}{train(region, scaler)}")

    # Say that this device's GELU is to compute in float32. Every region follows, PyTorch's own too.
    before = mezzo.torch.accelerator_policy(DEVICE).rule("gelu")
    mezzo.torch.register_kernel(DEVICE, "gelu", "fp32")
    print(f"\nrule for gelu: {before}, now {mezzo.torch.accelerator_policy(DEVICE).rule('gelu')}")
    print(f"{'bfloat16, new rule':<22}{train(torch.autocast(DEVICE, dtype=torch.bfloat16), off)}")


if __name__ == "__main__":
    main()
