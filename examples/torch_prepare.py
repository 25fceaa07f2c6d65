"""Train with bfloat16 parameters and float32 masters: clip, checkpoint, resume exactly, and see what is stored how.

Run it with ``python examples/torch_prepare.py``; it takes a few seconds.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.torch import autocast, float32_state_dict, master_params, memory_report, prepare

BATCH = 50


def digits() -> tuple[Tensor, Tensor]:
    """Load 1797 handwritten digits, 8x8 pixels, shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return images[order], torch.tensor(labels)[order]


def make(*, prepared: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a small convolution net, always the same, and its optimizer.

    Args:
        prepared: Store its parameters in bfloat16, with float32 masters in the optimizer.

    Returns:
        Net and optimizer.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
    if prepared:
        prepare(net, optimizer, dtype=torch.bfloat16)  # in place; model.parameters() are still the same objects
    return net, optimizer


def train(net: nn.Module, optimizer: torch.optim.Optimizer, epochs: range, *, low: bool = True) -> float:
    """Train on the first 1500 digits, as one would without masters.

    Args:
        net: The net.
        optimizer: Its optimizer, prepared or not.
        epochs: Which epochs; each has its own order of the batches.
        low: Under autocast in bfloat16, or in float32.

    Returns:
        The last loss.
    """
    images, labels = digits()
    net.train()
    for epoch in epochs:
        for start in torch.randperm(30, generator=torch.Generator().manual_seed(epoch)).tolist():
            rows = slice(BATCH * start, BATCH * start + BATCH)
            optimizer.zero_grad()
            with autocast("cpu", dtype=torch.bfloat16, enabled=low):
                loss = nn.functional.cross_entropy(net(images[rows]), labels[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # the masters' gradients are the same tensors
            optimizer.step()
    return loss.item()


def accuracy(net: nn.Module, *, low: bool = True) -> float:
    """Give the share of the held-out digits that are recognized."""
    images, labels = digits()
    with torch.no_grad(), autocast("cpu", dtype=torch.bfloat16, enabled=low):
        right = net.eval()(images[1500:]).argmax(-1) == labels[1500:]
    return right.float().mean().item()


def saved(net: nn.Module, optimizer: torch.optim.Optimizer) -> io.BytesIO:
    """Save a run, as ever: the masters are in the optimizer's state dict."""
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return file


def resumed(file: io.BytesIO) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Go on from a file, in a net that knows nothing of the run."""
    checkpoint: dict[str, Any] = torch.load(file)
    net, optimizer = make(prepared=True)
    net.load_state_dict(checkpoint["model"])  # in either order
    optimizer.load_state_dict(checkpoint["optimizer"])
    return net, optimizer


def same(one: nn.Module, other: nn.Module) -> bool:
    """Say whether two nets have the same state, bit for bit."""
    pairs = zip(float32_state_dict(one).values(), float32_state_dict(other).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def main() -> None:
    """Train in float32, under autocast, and prepared; stop the prepared run in the middle and resume it."""
    for name, low in (("float32", False), ("autocast", True)):
        net, optimizer = make(prepared=False)
        loss = train(net, optimizer, range(2), low=low)
        print(f"{name:<9} last loss {loss:.4f}, accuracy {accuracy(net, low=low):.1%}")

    net, optimizer = make(prepared=True)
    train(net, optimizer, range(1))
    file = saved(net, optimizer)
    loss = train(net, optimizer, range(1, 2))
    print(f"{'prepared':<9} last loss {loss:.4f}, accuracy {accuracy(net):.1%}")

    again, its_optimizer = resumed(file)
    train(again, its_optimizer, range(1, 2))
    print(f"resumed from the middle, same float32 weights: {same(net, again)}")

    print(f"the model has {net[5].weight.dtype}, the optimizer {next(iter(master_params(optimizer))).dtype}")
    report = memory_report(net, optimizer)
    print(report)
    for names in (report.stored, report.kept):
        for parameter, reason in names.items():
            print(f"{parameter:<9} {net.get_parameter(parameter).dtype!s:<15} {reason}")


if __name__ == "__main__":
    main()
