"""`nn.DataParallel` with autocast and a scaler: the region must reach the threads of the replicas.

Run it with ``python examples/torch_scaler_data_parallel.py``; it takes a few seconds. With two CUDA devices it trains on
them. Without, it shows on the CPU what matters: replicas run in threads, and a region belongs to its thread.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.torch import GradScaler, autocast

DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"


class Net(nn.Module):
    """A net whose ``forward`` opens the region itself, so that it is open in whichever thread runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    @autocast(DEVICE, dtype=torch.float16)
    def forward(self, x: Tensor) -> Tensor:
        """Give the logits of ten classes."""
        return self.layers(x)


class InThreads(nn.Module):
    """What `nn.DataParallel` does, for the CPU: half of the batch to each of two threads."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Run the module on both halves at the same time."""
        with ThreadPoolExecutor(2) as pool:
            return torch.cat(list(pool.map(self.module, x.chunk(2))))


def train(wrap: type[nn.Module] | None) -> tuple[float, float, torch.dtype]:
    """Train for two epochs; the loop is the plain one.

    Args:
        wrap: `nn.DataParallel`, its stand-in for the CPU, or None.

    Returns:
        The first and the last loss, and the dtype of the net's output.
    """
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    images, labels = images.to(DEVICE), labels.to(DEVICE)
    torch.manual_seed(0)
    net = Net().to(DEVICE)
    model = wrap(net) if wrap else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler(DEVICE, init_scale=2.0**12)
    losses = []
    for start in [*range(0, 1500, 100)] * 2:
        optimizer.zero_grad()
        with autocast(DEVICE, dtype=torch.float16):  # for the loss
            output = model(images[start : start + 100])
            loss = nn.functional.cross_entropy(output, labels[start : start + 100])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses[0], losses[-1], output.dtype


def main() -> None:
    """Train alone and in replicas."""
    if DEVICE == "cpu":
        print("fewer than two CUDA devices: two threads on the CPU stand for the replicas")
    for wrap in (None, nn.DataParallel if DEVICE == "cuda" else InThreads):
        first, last, dtype = train(wrap)
        name = wrap.__name__ if wrap else "one replica"
        print(f"{name:<13} loss {first:.4f} -> {last:.4f}, output {dtype}")


if __name__ == "__main__":
    main()
