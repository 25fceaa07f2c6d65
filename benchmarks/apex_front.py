"""What `mezzo.apex.amp` costs over plain mezzo: whole training steps, written the way of Apex and the way of PyTorch.

Both sides have the same net, optimizer, dtypes, scale and rule for it. They do the same in `Training`, and differ in what
stands around: ``amp.initialize`` and ``amp.scale_loss`` on the side of the front, a region or a prepared model and a
gradient scaler on the other. The level O1 leaves a region open in its thread, so each side has a process of its own.

All computing is in bfloat16 with a dynamic scale, though bfloat16 needs none: float16 takes so much longer on CPUs
without instructions for it that nothing of a front could be seen beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.calls import LOW
from benchmarks.work import Work, describe

if TYPE_CHECKING:
    from benchmarks.cases import Case
    from benchmarks.pairing import Side as SideName

# Steps too small to bring a weight anywhere in the time of a measurement.
SGD_RATE, ADAM_RATE = 1e-4, 1e-6
# Apex's numbers, so that both scales are the same at any time.
SCALE, INTERVAL, CEILING = 2.0**16, 2000, 2.0**24
# Backward passes in a step of the cases that accumulate.
BLOCKS = 4


class Way(NamedTuple):
    """A subject in its parts: ``O1-many-sgd-unscale`` and the like.

    Attributes:
        level: ``"O0"``, ``"O1"`` or ``"O2"``.
        net: Of `NETS`.
        optimizer: Of `OPTIMIZERS`.
        style: How plain mezzo's step is written: with ``"unscale"`` or without it, ``"step"``; or with how many backward
            passes, ``"blocks"``, and ``"delayed"`` where the front unscales in the last of them only.
    """

    level: str
    net: str
    optimizer: str
    style: str

    @property
    def passes(self) -> int:
        return BLOCKS if self.style in ("blocks", "delayed") else 1


def _tiny() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(16, 64)


def _mlp() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(512, 512), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight)
    return nn.Sequential(*layers[:-1]), torch.randn(64, 512)


def _many() -> tuple[nn.Module, Tensor]:
    # 300 parameters. Without the sums a signal would not get through so many layers.
    return nn.Sequential(*[_Residual() for _ in range(150)]), torch.randn(8, 16)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        nn.init.normal_(self.linear.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


NETS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"tiny": _tiny, "mlp": _mlp, "many": _many}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=SGD_RATE, foreach=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=ADAM_RATE, foreach=True),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=ADAM_RATE, fused=True),
}


@dataclass
class Net:
    """What both sides train: a model with its optimizer, a batch, and what its output is to come near to."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    target: Tensor

    def loss(self) -> Tensor:
        return F.mse_loss(self.model(self.inputs), self.target)


@dataclass
class Side:
    """What differs.

    Attributes:
        loss: Of a forward pass.
        backward: Propagates the loss of a pass, the number of which is given too.
        update: Steps, and what belongs to a step but zero_grad.
        factor: By what gradients are multiplied before ``update``.
    """

    loss: Callable[[], Tensor]
    backward: Callable[[Tensor, int], None]
    update: Callable[[], None]
    factor: float = 1.0


class Training:
    """What both sides do."""

    def __init__(self, way: Way, side: SideName) -> None:
        model, inputs = NETS[way.net]()
        self.net = Net(model, OPTIMIZERS[way.optimizer](model.parameters()), inputs, torch.randn(inputs.shape))
        self.passes = range(way.passes)
        self.side = _front(way, self.net) if side == "mezzo" else _plain(way, self.net)

    def step(self) -> None:
        self.gradients()
        self.side.update()
        self.net.optimizer.zero_grad()

    def gradients(self) -> None:
        side = self.side
        for number in self.passes:
            side.backward(side.loss(), number)

    def descent(self) -> Tensor:
        """How far a step goes downhill: gradients times what the optimizer's float32 weights moved, in learning rates."""
        self.gradients()
        slope = torch.cat([each.grad.flatten().float() for each in self.net.model.parameters()]) / self.side.factor
        before = _weights(self.net.optimizer)
        self.side.update()
        self.net.optimizer.zero_grad()
        # Products that no autocast touches: O1's region stays open.
        return (slope * (_weights(self.net.optimizer) - before)).sum() / self.net.optimizer.param_groups[0]["lr"]


def apex_work(case: Case, side: SideName) -> Work:
    training = Training(Way(*case.subject.split("-")), side)

    def loop(count: int) -> None:
        for _ in repeat(None, count):
            training.step()

    return Work(loop, lambda: describe(training.descent()))


def _front(way: Way, net: Net) -> Side:
    """Make the side that is written for Apex."""
    from mezzo.apex import amp

    model, optimizer = net.model, net.optimizer
    options: dict[str, Any] = {} if way.level == "O0" else {"loss_scale": "dynamic"}
    amp.initialize(model, optimizer, opt_level=way.level, dtype=LOW, verbosity=0, **options)
    last = way.passes - 1

    def backward(loss: Tensor, number: int) -> None:
        with amp.scale_loss(loss, optimizer, delay_unscale=way.style == "delayed" and number < last) as scaled:
            scaled.backward()

    return Side(net.loss, backward, optimizer.step)


def _plain(way: Way, net: Net) -> Side:
    """Make the side that is written for `mezzo.torch`, or for float32 where there is nothing to be mixed."""
    model, optimizer = net.model, net.optimizer
    if way.level == "O0":
        return Side(net.loss, lambda loss, _: loss.backward(), optimizer.step)
    from mezzo.torch import GradScaler, autocast, prepare

    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=INTERVAL, max_scale=CEILING)

    def backward(loss: Tensor, _number: int) -> None:
        scaler.scale(loss).backward()

    def update() -> None:
        if way.style == "unscale":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    if way.level == "O1":

        def autocast_loss() -> Tensor:
            with autocast("cpu", LOW, policy="apex-o1"):
                return net.loss()

        return Side(autocast_loss, backward, update, SCALE)
    kept = [nn.BatchNorm1d] if any(isinstance(each, nn.BatchNorm1d) for each in model.modules()) else []
    prepare(model, optimizer, dtype=LOW, low="**", keep=kept, buffers=True)

    def prepared_loss() -> Tensor:
        return F.mse_loss(model(net.inputs.to(LOW)).float(), net.target)

    return Side(prepared_loss, backward, update, SCALE)


def _weights(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([weight.detach().flatten() for group in optimizer.param_groups for weight in group["params"]])
