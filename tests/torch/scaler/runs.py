"""Training runs that are the same script under either scaler, and what they leave behind, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import GradScaler

INF, NAN = float("inf"), float("nan")
CLASSES = {"torch": torch.amp.GradScaler, "mezzo": GradScaler}
each_class = pytest.mark.parametrize("scaler_class", CLASSES.values(), ids=CLASSES.keys())

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
LOOPS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
each_loop = pytest.mark.parametrize("loop", LOOPS)

# Growth after four good steps: with a fault in every ninth step or so, the scale moves both ways all the time.
BUSY = {"init_scale": 2.0**16, "growth_interval": 4}


def make_optimizer(name: str, loop: str, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    return kind(parameters, **options, **LOOPS[loop])


def make_scaler(kind: str | type, **numbers: Any) -> Any:
    return (CLASSES[kind] if isinstance(kind, str) else kind)("cpu", **numbers)


def make_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def make_batches(steps: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 8, generator=generator).to(dtype), torch.randn(8, 4, generator=generator).to(dtype))
        for _ in range(steps)
    ]


def make_faults(steps: int, seed: int = 0) -> list[float | None]:
    """Say for each step what is written into a gradient: nothing, an Inf of either sign, or NaN.

    A run of seven NaNs is among them, the longest that mezzo's rule about lasting NaNs leaves alone. The first step is
    good: PyTorch's fused SGD takes momentum from memory that nobody wrote when its first step is skipped.
    """
    dice = random.Random(seed)
    faults = [None, *dice.choices([None, INF, -INF, NAN], weights=[24, 1, 1, 1], k=steps - 1)]
    if steps >= 100:
        faults[60:69] = [None, *[NAN] * 7, None]
    return faults


def spoil(parameters: Iterable[Tensor], fault: float | None, dice: random.Random) -> None:
    """Write the fault into one element of one gradient, as an overflow in backward would."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if fault is None or not grads:
        return
    grad = dice.choice(grads)
    values = (grad._values() if grad.is_sparse else grad).view(-1)
    values[dice.randrange(values.numel())] = fault


@dataclass
class Outcome:
    """What a run leaves: after each step the scale, the tracker and the gradients; at the end all tensors."""

    scales: list[float] = field(default_factory=list)
    trackers: list[int] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def note(self, scaler: Any, parameters: Iterable[Tensor] = ()) -> None:
        if scaler is not None:
            self.scales.append(scaler.get_scale())
            self.trackers.append(scaler._get_growth_tracker())
        self.keep(parameter.grad for parameter in parameters)

    def keep(self, tensors: Iterable[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None:
                self.tensors.append((tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()).clone())

    def finish(self, parameters: Iterable[Tensor], *optimizers: torch.optim.Optimizer) -> Outcome:
        self.keep(parameters)
        for optimizer in optimizers:
            self.keep(_tensors_of_state(optimizer))
        return self


def _tensors_of_state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state_dict()["state"].values():
        yield from (state[key] for key in sorted(state) if isinstance(state[key], Tensor))


def assert_equal(one: Outcome, other: Outcome) -> None:
    """Assert bit equality, NaNs in the gradients of skipped steps included, of runs whose scale is far from the floor."""
    assert one.scales == other.scales
    assert min(other.scales, default=1.0) >= 2.0**-16
    assert one.trackers == other.trackers
    assert len(one.tensors) == len(other.tensors)
    assert_same(one.tensors, other.tensors)


def assert_same(got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Assert bit equality of two lists of tensors, dtypes and NaNs included."""
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def parameters_of(net: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


@dataclass(frozen=True)
class Script:
    """One training script; `run` does it under a scaler of either class, or under none."""

    optimizer: str = "sgd"
    loop: str = "for-loop"
    steps: int = 200
    clip: bool = False
    micro_steps: int = 1
    dtype: torch.dtype = torch.float32
    with_faults: bool = True
    numbers: dict[str, Any] = field(default_factory=lambda: dict(BUSY))
    region: Callable[[], AbstractContextManager[Any]] = nullcontext
    edit: Callable[[Tensor], Tensor] | None = None
    with_gradients: bool = True
    watched: bool = True

    def run(self, kind: str | type | None, change: Callable[[int, Any], Any] | None = None) -> Outcome:
        """Run; ``change`` is given each step's number and the scaler, and returns the scaler to go on with."""
        net, outcome, dice = make_net(dtype=self.dtype), Outcome(), random.Random(7)
        optimizer = make_optimizer(self.optimizer, self.loop, net.parameters())
        scaler = None if kind is None else make_scaler(kind, **self.numbers)
        faults = make_faults(self.steps) if self.with_faults else [None] * self.steps
        for number, (x, y) in enumerate(make_batches(self.steps, dtype=self.dtype)):
            if change is not None:
                scaler = change(number, scaler)
            optimizer.zero_grad()
            self._gradients(net, x, y, scaler)
            spoil(net.parameters(), faults[number], dice)
            self._step(net, optimizer, scaler)
            if self.watched or number == self.steps - 1:
                outcome.note(scaler, net.parameters() if self.with_gradients else ())
        return outcome.finish(net.parameters(), optimizer)

    def _gradients(self, net: nn.Module, x: Tensor, y: Tensor, scaler: Any) -> None:
        for inputs, targets in zip(x.chunk(self.micro_steps), y.chunk(self.micro_steps), strict=True):
            with self.region():
                loss = nn.functional.mse_loss(net(inputs), targets) / self.micro_steps
            (loss if scaler is None else scaler.scale(loss)).backward()

    def _step(self, net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        if scaler is not None and (self.clip or self.edit):
            scaler.unscale_(optimizer)
        if self.clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        if self.edit:
            for parameter in net.parameters():
                parameter.grad = self.edit(parameter.grad)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
