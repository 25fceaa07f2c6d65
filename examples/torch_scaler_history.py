"""Keep the history of a scale: rows without waiting for the device, a picture, and a callback as TensorBoard's.

Run it with ``python examples/torch_scaler_history.py [scale.png]``; it takes a few seconds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from mezzo.torch import GradScaler, ScaleHistory, autocast

CLIP = 0.5
GROWTH_INTERVAL = 8


class Lines:
    """Stands for ``torch.utils.tensorboard.SummaryWriter``, which has this method and needs a package of its own."""

    def __init__(self) -> None:
        self.count = 0

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write a number; here, only of the steps that were skipped."""
        self.count += 1
        if tag == "amp/skipped" and scalar_value:
            print(f"  {tag} at step {global_step}")


def train(scaler: GradScaler) -> float:
    """Train for 60 steps, of which one has a broken batch.

    Args:
        scaler: The scaler; what watches it is no affair of the loop.

    Returns:
        The last loss.
    """
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    loss = torch.zeros(())
    for step in range(60):
        rows = slice(50 * (step % 30), 50 * (step % 30) + 50)
        batch = images[rows] * (torch.inf if step == 40 else 1.0)
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(batch), labels[rows])
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, CLIP)  # the history takes down the norm that this gives
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def main() -> None:
    """Train with a scale that is too high at first, and look at its history."""
    scaler = GradScaler("cpu", init_scale=2.0**22, growth_interval=GROWTH_INTERVAL)
    writer = Lines()
    print("told while the net is trained:")
    with ScaleHistory(scaler, callback=writer, every=20) as history:
        loss = train(scaler)
    print(f"{writer.count} numbers told of {len(history.rows())} steps; last loss {loss:.4f}")

    rows = history.rows()
    moved = [row for row, before in zip(rows, [None, *rows], strict=False) if before and row.scale != before.scale]
    print("the scale at the start and wherever it moved:")
    for row in [rows[0], *moved]:
        print(f"  step {row.step:2}: 2**{torch.tensor(row.scale).log2().int()}")
    norms = [row.norm for row in rows if row.norm is not None and not row.skipped]
    print(f"norms before clipping: from {min(norms):.3f} to {max(norms):.3f}, {sum(n > CLIP for n in norms)} clipped")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "scale.png"
        history.plot(path)
        print(f"picture of {path.stat().st_size // 1000} kB in {path.name}")


if __name__ == "__main__":
    main()
