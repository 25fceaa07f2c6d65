"""One script, with and without the contract: only the optimizer's constructor changes, and the parameters agree."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import GradScaler

from .optimizers import Momentum, Watched, backward, parameter

Make = Callable[..., torch.optim.Optimizer]

# Without the contract, with it. The second differs in nothing but the constructor's argument.
PAIRS: dict[str, tuple[Make, Make]] = {
    "custom": (Momentum, lambda parameters: Momentum(parameters, scaled=True)),
}
for _kind, _numbers in {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9},
    torch.optim.Adam: {"lr": 0.01},
    torch.optim.AdamW: {"lr": 0.01},
    torch.optim.Adagrad: {"lr": 0.05},
}.items():
    PAIRS[_kind.__name__] = tuple(
        lambda parameters, kind=_kind, numbers=_numbers, fused=fused: kind(parameters, fused=fused, **numbers)
        for fused in (False, True)
    )
pairs = pytest.mark.parametrize(("plain", "scaled"), PAIRS.values(), ids=PAIRS)
constructors = pytest.mark.parametrize("make", [scaled for _, scaled in PAIRS.values()], ids=PAIRS)


def train(
    make: Make, scaler: torch.amp.GradScaler, *, explicit: bool = False, steps: int = 40
) -> tuple[list[Tensor], list[float]]:
    """A script; nothing in it knows which optimizer it is given. Every fifth gradient or so is non-finite."""
    torch.manual_seed(0)
    dice = random.Random(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = make(model.parameters())
    scales = []
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        if dice.random() < 0.2:
            model[2].weight.grad[0, 3] = dice.choice([float("inf"), float("nan")])
        if explicit:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [weight.detach() for weight in model.parameters()], scales


@pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "unscale_ and clip"])
@pairs
def test_only_the_constructor_changes(plain: Make, scaled: Make, explicit: bool) -> None:
    numbers = {"init_scale": 2.0**12, "growth_interval": 6}
    without, scales = train(plain, GradScaler("cpu", **numbers), explicit=explicit)
    with_contract, same_scales = train(scaled, GradScaler("cpu", **numbers), explicit=explicit)
    assert scales == same_scales
    assert len(set(scales)) > 2
    # A fused kernel rounds in another order.
    torch.testing.assert_close(with_contract, without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "unscale_ and clip"])
@constructors
def test_parameters_are_those_under_pytorchs_scaler(make: Make, explicit: bool) -> None:
    numbers = {"init_scale": 2.0**12, "growth_interval": 6}
    ours, scales = train(make, GradScaler("cpu", **numbers), explicit=explicit)
    theirs, their_scales = train(make, torch.amp.GradScaler("cpu", **numbers), explicit=explicit)
    assert scales == their_scales
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("explicit", [False, True])
@constructors
def test_nothing_is_left_on_the_optimizer(make: Make, explicit: bool) -> None:
    weight = parameter()
    optimizer = make([weight])
    before = set(vars(optimizer))
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        backward(scaler, weight)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert set(vars(optimizer)) == before


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_step_divides_by_a_users_own_grad_scale_too(kind: Any, explicit: bool) -> None:
    weight, other = parameter(), parameter()
    optimizer, reference = kind([weight], lr=0.1, fused=True), kind([other], lr=0.1, fused=True)
    optimizer.grad_scale = torch.tensor(4.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, -3.0):
        optimizer.zero_grad()
        backward(scaler, weight, factor)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        other.grad = torch.full_like(other, factor / 4.0)
        reference.step()
    torch.testing.assert_close(weight, other, rtol=0, atol=0)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_float16_parameters_and_gradients_with_fused_optimizers(kind: Any, explicit: bool) -> None:
    weight, other = parameter(dtype=torch.float16), parameter(dtype=torch.float16)
    optimizer, reference = kind([weight], lr=0.125, fused=True), kind([other], lr=0.125, fused=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    for factor, bad in ((1.0, False), (-3.0, True), (0.5, False)):
        optimizer.zero_grad()
        backward(scaler, weight, factor)
        assert weight.grad.dtype is torch.float16
        if bad:
            weight.grad[0] = float("inf")
        else:
            other.grad = torch.full_like(other, factor)
            reference.step()
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert weight.dtype is torch.float16
    # Factors and scales are powers of two, or small multiples: exact in float16.
    torch.testing.assert_close(weight, other, rtol=0, atol=0)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("make", [*(scaled for _, scaled in PAIRS.values()), Momentum], ids=[*PAIRS, "plain"])
def test_a_step_that_a_scheduler_has_wrapped_is_the_one_called(make: Make) -> None:
    """A scheduler warns where its optimizer's wrapped step was not called; warnings are errors here."""
    weight = parameter()
    optimizer = make([weight])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rate = optimizer.param_groups[0]["lr"]
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        backward(scaler, weight)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert scheduler.get_last_lr() == [rate / 4]
    assert weight.tolist() != [1.0, 2.0]


def test_optimizers_with_and_without_the_contract_share_a_scaler() -> None:
    fine, broken = parameter(), parameter()
    plain, scaled = Momentum([fine], lr=0.5, momentum=0.0), Watched([broken], lr=0.5, momentum=0.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    for bad in (False, True):
        for weight, optimizer in ((fine, plain), (broken, scaled)):
            optimizer.zero_grad()
            backward(scaler, weight, 2.0)
        if bad:
            broken.grad[0] = float("inf")
        scaler.step(plain)
        scaler.step(scaled)
        scaler.update()
    assert fine.tolist() == [-1.0, 0.0]
    assert broken.tolist() == [0.0, 1.0]
    assert (scaler.stepped(plain), scaler.stepped(scaled)) == (True, False)
    assert scaler.get_scale() == 4.0
