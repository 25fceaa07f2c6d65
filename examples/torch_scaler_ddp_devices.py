"""DistributedDataParallel with several devices per process: autocast inside of ``forward``.

Run it with ``python examples/torch_scaler_ddp_devices.py``; it takes a few seconds. It needs two CUDA devices to show all
of it; with fewer it says so and runs both halves of the model on the CPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.torch import GradScaler, autocast


class TwoHalves(nn.Module):
    """A model that lies on two devices. DDP may run its ``forward`` in a thread, so the region is opened in here."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).to(first)
        self.head = nn.Linear(64, 10).to(second)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits, on the second device."""
        # One region serves all devices of a type.
        with autocast(self.first.type, dtype=torch.float16):
            hidden = self.body(x.to(self.first))
            return self.head(hidden.to(self.second))


def train(first: torch.device, second: torch.device) -> None:
    """Train for one epoch and print what came of it.

    Args:
        first: Where the body lies.
        second: Where the head lies.
    """
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoHalves(first, second))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = GradScaler(first.type, init_scale=2.0**12)
    losses = []
    for step, start in enumerate(range(0, 1500, 50)):
        optimizer.zero_grad()
        output = model(images[start : start + 50])
        loss = nn.functional.cross_entropy(output.float(), labels[start : start + 50].to(second))
        scaler.scale(loss).backward()
        if step == 5:
            model.module.head.bias.grad[0] = torch.inf  # on one of the devices
        scaler.step(optimizer)  # checks the gradients of each device on that device
        scaler.update()
        losses.append(loss.item())
    print(
        f"body on {first}, head on {second}: loss {losses[0]:.4f} -> {losses[-1]:.4f},"
        f" {scaler.steps_taken(optimizer)} of 30 steps, output {output.dtype}"
    )


def main() -> None:
    """Be the only process of the group; with more processes, each would have devices of its own."""
    enough = torch.cuda.device_count() > 1
    if not enough:
        print("fewer than two CUDA devices: both halves of the model run on the CPU")
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)] if enough else [torch.device("cpu")] * 2
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = Path(folder, "meeting-point")
        backend = "nccl" if enough else "gloo"
        dist.init_process_group(backend, init_method=f"file://{meeting_point}", rank=0, world_size=1)
        train(*devices)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
