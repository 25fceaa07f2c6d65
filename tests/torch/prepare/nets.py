"""Small nets, their training loops, and float32 masters kept by hand, against which prepared runs are held."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.torch import autocast, prepare

BF16 = torch.bfloat16
Optimizer = torch.optim.Optimizer
Make = Callable[[Any], Any]
"""Makes an optimizer of parameters."""


def mlp() -> nn.Module:
    """Two linear layers that are stored low, and a norm that is not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


class ConvNet(nn.Sequential):
    """Convolutions with batch norms, on the same vectors as the others."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 2, 3)),
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Flatten(),
            nn.Linear(24, 3),
        )


class Encoder(nn.Sequential):
    """A transformer's encoder layer, on vectors cut into three steps."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (3, 2)),
            nn.Linear(2, 8),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(24, 3),
        )


def convnet() -> nn.Module:
    """A net with batch norms."""
    torch.manual_seed(0)
    return ConvNet()


def encoder() -> nn.Module:
    """A net with attention."""
    torch.manual_seed(0)
    return Encoder()


def batches(count: int, seed: int = 1, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Inputs of 6 features with their classes, of 3."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], dtype: torch.dtype = BF16) -> Tensor:
    """The loss of a model in a region of mezzo's autocast."""
    with autocast("cpu", dtype=dtype):
        loss: Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return loss


def train(model: nn.Module, optimizer: Optimizer, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train in the plainest way; give the losses."""
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def prepared(make: Make, net: Callable[[], nn.Module] = mlp, **options: Any) -> tuple[Any, Any]:
    """A net and an optimizer of its parameters, prepared."""
    model = net()
    return prepare(model, make(model.parameters()), **options)


def held(optimizer: Optimizer) -> list[Any]:
    """What an optimizer's groups hold, in their order."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def tensors_in(state: Any) -> Iterator[Tensor]:
    """The tensors of an optimizer's state, by the order of its keys; numbers as tensors."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from tensors_in(state[key])
    elif isinstance(state, list | tuple):
        for each in state:
            yield from tensors_in(each)
    elif isinstance(state, int | float):
        yield torch.tensor(state, dtype=torch.float64)


def everything(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Copies of all that a step may change: the model, and the optimizer's state with masters and counters."""
    found = [*model.state_dict().values(), *tensors_in(optimizer.state_dict())]
    return [one.detach().clone() for one in copy.copy(found)]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether tensors are bit for bit the same (NaN is itself)."""
    return len(some) == len(others) and all(
        one.dtype is other.dtype
        and one.shape == other.shape
        and bool(torch.equal(one.nan_to_num(7), other.nan_to_num(7)))
        for one, other in zip(some, others, strict=True)
    )


def assert_rounded(optimizer: Optimizer) -> None:
    """Each master rounds to its parameter of the model."""
    for one in held(optimizer):
        if hasattr(one, "model_param"):
            assert torch.equal(one.detach().to(one.model_param.dtype), one.model_param.detach())


class ByHand:
    """A model whose low parameters have float32 masters that are kept by hand.

    Args:
        net: Makes the model.
        like: A prepared model from the same net: the parameters that are low there are low here.
        make: Makes an optimizer of (name, parameter or master) pairs' second parts.
    """

    def __init__(self, net: Callable[[], nn.Module], like: nn.Module, make: Make) -> None:
        self.model = net()
        self.masters: list[nn.Parameter] = []
        dtypes = {name: one.dtype for name, one in like.named_parameters()}
        self.low: list[nn.Parameter] = []
        for name, one in self.model.named_parameters():
            if dtypes[name] is torch.float32:
                self.masters.append(one)
            else:
                self.masters.append(nn.Parameter(one.detach().clone()))
                one.data = one.detach().to(dtypes[name])
            self.low.append(one)
        self.optimizer = make(self.masters)

    def gradients(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Evaluate the model with the masters of the moment; leave their gradients in float32."""
        self.refresh()
        self.model.zero_grad()
        loss = loss_of(self.model, batch)
        loss.backward()
        for master, one in zip(self.masters, self.low, strict=True):
            master.grad = None if one.grad is None else one.grad.float()
        return loss

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """Make a step; give the loss."""
        loss = self.gradients(batch)
        self.optimizer.step()
        self.refresh()
        return loss.item()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters to the model."""
        for master, one in zip(self.masters, self.low, strict=True):
            if master is not one:
                one.copy_(master)

    def assert_like(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Masters and model are bit for bit those of the prepared run."""
        assert same([one.detach() for one in self.masters], [one.detach() for one in held(optimizer)])
        assert same([one.detach() for one in self.low], [one.detach() for one in model.parameters()])
