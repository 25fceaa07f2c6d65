"""A training script in the style of the ImageNet example: strings from the command line, meters, top-1 and top-5.

``--keep-batchnorm-fp32`` and ``--loss-scale`` come as strings, or not at all, and go to ``amp.initialize`` as they are. The
images are small digits. Run it with ``python examples/apex/imagenet.py --opt-level O2 --loss-scale 128.0``; it takes some
seconds. With ``from apex import amp`` in the place of the import below, ``python -m mezzo.apex imagenet.py`` runs it.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from mezzo.apex import amp


class Block(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """Add both ways up."""
        return torch.relu(self.body(x) + self.shortcut(x))


class Meter:
    """A mean over an epoch."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        """Take the mean of some more."""
        self.sum, self.count = self.sum + value * count, self.count + count

    @property
    def mean(self) -> float:
        """The mean of all so far."""
        return self.sum / self.count


def accuracy(output: Tensor, target: Tensor, largest: int) -> float:
    """Give the share in percent of those whose class is among the largest outputs."""
    found = output.topk(largest, dim=1).indices
    return 100 * (found == target.unsqueeze(1)).any(1).float().mean().item()


def run(loader: DataLoader, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    """Train for an epoch; without an optimizer, validate."""
    meters = {name: Meter() for name in ("loss", "top-1", "top-5")}
    model.train(optimizer is not None)
    with torch.set_grad_enabled(optimizer is not None):
        for images, target in loader:
            output = model(images)
            loss = nn.functional.cross_entropy(output, target)
            if optimizer is not None:
                optimizer.zero_grad()
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
            values = (loss.item(), accuracy(output, target, 1), accuracy(output, target, 5))
            for meter, value in zip(meters.values(), values, strict=True):
                meter.update(value, len(target))
    return {name: meter.mean for name, meter in meters.items()}


def main() -> None:
    """Train, and validate after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels))
    training, validation = random_split(digits, [1500, 297])
    model: nn.Module = nn.Sequential(Block(1, 8, 2), Block(8, 16, 1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.3)
    for epoch in range(args.epochs):
        for name, loader, its_optimizer in (
            ("training  ", DataLoader(training, batch_size=50, shuffle=True), optimizer),
            ("validation", DataLoader(validation, batch_size=99), None),
        ):
            means = run(loader, model, its_optimizer)
            print(f"epoch {epoch} {name} " + ", ".join(f"{what} {mean:.3f}" for what, mean in means.items()))
        scheduler.step()


if __name__ == "__main__":
    main()
