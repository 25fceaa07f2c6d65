"""One gradient, several optimizers or losses: it is unscaled once, and clipped at its true size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo import ScalerProtocolError
from mezzo.torch import GradScaler

from .runs import INF, LOOPS, assert_same, each_loop, make_optimizer

each_pair = pytest.mark.parametrize("loops", [(a, b) for a in LOOPS for b in LOOPS], ids="+".join)


class Shared:
    """Three weights; the middle one belongs to both optimizers."""

    def __init__(self, loops: tuple[str, str]) -> None:
        torch.manual_seed(0)
        self.weights = [nn.Parameter(torch.randn(3)) for _ in range(3)]
        self.optimizers = [
            make_optimizer("sgd", loops[0], self.weights[:2]),
            make_optimizer("adam", loops[1], self.weights[1:]),
        ]

    def loss(self, factor: float = 1.0) -> Tensor:
        return sum(weight.sin().sum() for weight in self.weights) * factor

    def values(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.weights]


def plainly(loops: tuple[str, str], steps: int) -> list[Tensor]:
    one = Shared(loops)
    for _ in range(steps):
        for optimizer in one.optimizers:
            optimizer.zero_grad()
        one.loss().backward()
        for optimizer in one.optimizers:
            optimizer.step()
    return one.values()


@each_pair
@pytest.mark.parametrize("unscaled", [(), (0,), (1,), (0, 1), (1, 0), (0, 1, 0)], ids=str)
def test_a_parameter_in_two_optimizers_is_unscaled_once(loops: tuple[str, str], unscaled: tuple[int, ...]) -> None:
    one, scaler = Shared(loops), GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for _ in range(3):
        for optimizer in one.optimizers:
            optimizer.zero_grad()
        scaler.scale(one.loss()).backward()
        for index in unscaled:
            scaler.unscale_(one.optimizers[index])
        for optimizer in one.optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert_same(one.values(), plainly(loops, 3))
    assert scaler.get_scale() == 2.0**13


@each_pair
@pytest.mark.parametrize("unscaled", [(), (0,), (1,), (0, 1)], ids=str)
def test_an_inf_in_a_shared_gradient_stops_both(loops: tuple[str, str], unscaled: tuple[int, ...]) -> None:
    one, scaler = Shared(loops), GradScaler("cpu", init_scale=2.0**10)
    before = one.values()
    # A good step first: PyTorch's fused SGD takes momentum from unwritten memory when its first step is skipped.
    scaler.scale(one.loss()).backward()
    for optimizer in one.optimizers:
        scaler.unscale_(optimizer)
    for optimizer in one.optimizers:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
    assert not torch.equal(one.values()[1], before[1])
    before = one.values()
    scaler.scale(one.weights[1].sum() * INF + one.weights[0].sum() + one.weights[2].sum()).backward()
    for index in unscaled:
        scaler.unscale_(one.optimizers[index])
    for optimizer in one.optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert_same(one.values(), before)
    assert scaler.get_scale() == 2.0**9


class Dividing(torch.optim.SGD):
    """Divides by itself, into tensors of its own: its gradients stay scaled."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        divisor = 1.0 if self.grad_scale is None else self.grad_scale
        for parameter in self.param_groups[0]["params"]:
            parameter -= torch.where(self.found_inf > 0, 0.0, parameter.grad / divisor)


@each_loop
def test_what_is_divided_out_of_sight_has_to_be_unscaled_first(loop: str) -> None:
    one, scaler = Shared(("for-loop", loop)), GradScaler("cpu", init_scale=2.0**10)
    one.optimizers[0] = Dividing(one.weights[:2], lr=1.0)
    scaler.scale(one.loss()).backward()
    scaler.step(one.optimizers[0])
    before = one.values()
    with pytest.raises(ScalerProtocolError, match=r"1 parameter\(s\) belong to .* Dividing too.*unscale_\(\) of both"):
        scaler.step(one.optimizers[1])
    assert_same(one.values(), before)
    scaler.update()
    one.optimizers[0].zero_grad()
    one.optimizers[1].zero_grad()
    scaler.scale(one.loss()).backward()
    expected = [weight - weight.cos() for weight in before[:2]]
    for optimizer in one.optimizers:
        scaler.unscale_(optimizer)
    assert_same([weight.grad for weight in one.weights], [weight.cos() for weight in before])
    scaler.step(one.optimizers[0])
    assert_same(one.values()[:2], expected)


class Adversaries:
    """A generator and a discriminator; D is unscaled and clipped before the loss of G goes backward."""

    def __init__(self, loop: str) -> None:
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizers = [
            make_optimizer("adam", loop, self.discriminator.parameters()),
            make_optimizer("sgd", loop, self.generator.parameters()),
        ]

    def train(self, scaler: Any, *, reaches: bool, clip_late: bool, steps: int = 4) -> list[Tensor]:
        for number in range(steps):
            noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            self._gradients(noise, scaler, reaches=reaches, clip_late=clip_late)
            for optimizer in self.optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
        return [p.detach().clone() for net in (self.generator, self.discriminator) for p in net.parameters()]

    def _gradients(self, noise: Tensor, scaler: Any, *, reaches: bool, clip_late: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        fake = self.generator(noise)
        self._backward(self.discriminator(fake.detach()).square().mean(), scaler)
        if scaler is not None:
            scaler.unscale_(self.optimizers[0])
        if not clip_late:
            self._clip()
        self.discriminator.requires_grad_(reaches)
        self._backward((self.discriminator(fake) - 1).square().mean(), scaler)
        self.discriminator.requires_grad_(True)
        if clip_late:
            self._clip()

    def _clip(self) -> None:
        nn.utils.clip_grad_norm_(self.discriminator.parameters(), 0.1)

    @staticmethod
    def _backward(loss: Tensor, scaler: Any) -> None:
        (loss if scaler is None else scaler.scale(loss)).backward()


@each_loop
@pytest.mark.parametrize("reaches", [True, False], ids=["into D", "past D"])
@pytest.mark.parametrize("clip_late", [True, False], ids=["clipped last", "clipped first"])
def test_the_loss_of_a_generator_after_its_discriminator_was_unscaled(
    loop: str, reaches: bool, clip_late: bool
) -> None:
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    values = Adversaries(loop).train(scaler, reaches=reaches, clip_late=clip_late)
    assert_same(values, Adversaries(loop).train(None, reaches=reaches, clip_late=clip_late))
    assert scaler.get_scale() == 2.0**12
