"""A training loop for any of Apex's levels: only ``--opt-level`` changes, and O0 is float32 bit for bit.

Run it with ``python examples/apex/training_loop.py --opt-level O2``; without arguments it runs all four levels in some
seconds. With ``from apex import amp`` in the place of the import below, ``python -m mezzo.apex training_loop.py`` runs it.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.apex import amp

LEVELS = ["O0", "O1", "O2", "O3"]


def digits() -> tuple[Tensor, Tensor]:
    """Load 1797 handwritten digits, 8x8 pixels, shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return images[order], torch.tensor(labels)[order]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a small net with a batch norm, always the same, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(opt_level: str) -> nn.Module:
    """Train for two epochs on the first 1500 digits: the loop as it was for Apex.

    Args:
        opt_level: O0, O1, O2 or O3.

    Returns:
        The model.
    """
    model, optimizer = make()
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    images, labels = digits()
    for start in 2 * list(range(0, 1500, 50)):
        output = model(images[start : start + 50])
        loss = nn.functional.cross_entropy(output, labels[start : start + 50])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return model


def train_in_float32() -> nn.Module:
    """Train in the same way without amp."""
    model, optimizer = make()
    images, labels = digits()
    for start in 2 * list(range(0, 1500, 50)):
        loss = nn.functional.cross_entropy(model(images[start : start + 50]), labels[start : start + 50])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main() -> None:
    """Train at each level, and compare with float32."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--opt-level", nargs="+", default=LEVELS, metavar="LEVEL", help="one of O0, O1, O2, O3, or several"
    )
    images, labels = digits()
    expected = train_in_float32().state_dict()
    for level in parser.parse_args().opt_level:
        model = train(level)
        weights = model.state_dict()  # float32 at each level
        same = all(torch.equal(weights[name], value) for name, value in expected.items())
        with torch.no_grad():
            right = model.eval()(images[1500:]).argmax(-1) == labels[1500:]
        stored = "/".join(str(model[layer].weight.dtype).removeprefix("torch.") for layer in (0, 1))
        print(
            f"{level}: conv/norm weights {stored}, output {model(images[:1]).dtype},"
            f" accuracy {right.float().mean().item():.1%}, the same as without amp: {same}"
        )


if __name__ == "__main__":
    main()
