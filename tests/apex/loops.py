"""Training loops of users, the same at every level, and the digits that they learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mezzo.apex import amp


@dataclass(frozen=True)
class Digits:
    """Images of 8 by 8 numbers, and which digits they show."""

    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor

    def batches(self, count: int, rows: int = 48) -> Iterator[tuple[Tensor, Tensor]]:
        """Give batches, the same at each call."""
        choose = torch.Generator().manual_seed(1)
        for _ in range(count):
            some = torch.randint(0, len(self.inputs), (rows,), generator=choose)
            yield self.inputs[some], self.labels[some]


def digits() -> Digits:
    data, target = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(data, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inputs, labels = inputs[order], labels[order]
    return Digits(inputs[:1400], labels[:1400], inputs[1400:], labels[1400:])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


NETS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "conv and batch norm": convnet}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def accuracy(model: nn.Module, data: Digits) -> float:
    model.eval()
    with torch.no_grad():
        right = model(data.test_inputs).argmax(1) == data.test_labels
    model.train()
    return right.float().mean().item()


@dataclass
class Seen:
    """What a run saw at each step.

    Attributes:
        finite: Whether all gradients were finite at the end of the block, while they were scaled.
        stepped: Whether the step changed a weight.
        scales: The scale after each block.
        losses: The losses.
    """

    finite: list[bool] = field(default_factory=list)
    stepped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def train(model: nn.Module, optimizer: Any, data: Digits, steps: int) -> None:
    """A training loop as in Apex's documentation."""
    for inputs, labels in data.batches(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def watched(model: nn.Module, optimizer: Any, data: Digits, steps: int) -> Seen:
    """The same loop, with a look of its own at the gradients and weights."""
    seen = Seen()
    for inputs, labels in data.batches(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            seen.finite.append(
                all(bool(one.grad.isfinite().all()) for one in model.parameters() if one.grad is not None)
            )
        before = copies(amp.master_params(optimizer))
        optimizer.step()
        after = copies(amp.master_params(optimizer))
        seen.stepped.append(any(not torch.equal(*pair) for pair in zip(before, after, strict=True)))
        seen.scales.append(amp._amp_state.loss_scalers[0].loss_scale())
        seen.losses.append(loss.item())
    return seen


def copies(tensors: Any) -> list[Tensor]:
    return [one.detach().clone() for one in tensors]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.dtype is other.dtype and torch.equal(one, other) for one, other in zip(some, others, strict=True)
    )


def alike(one: Any, other: Any) -> bool:
    """Say whether two nested values, such as the state of optimizers, are the same bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return same([one], [other])
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)
