"""NaN that no scale has made stops the backing off; NaN that a scale has made does not, however long it lasts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import GradScaler, autocast

START = 2.0**16
STOPPED = 2.0**8  # after eight backoffs


def overflowing_run(scaler: torch.amp.GradScaler, times: float) -> tuple[list[float], list[Tensor]]:
    """Train a small net in float16 whose loss is far too large, so that the first gradients are NaN and nothing else."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    x, target = torch.randn(8, 16), torch.linspace(-1, 1, 8)[:, None]
    scales = []
    for _ in range(40):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(net(x), target) * times
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("times", [2.0**16, 2.0**20], ids=["2**16", "2**20"])
def test_a_scale_that_begins_far_too_large_comes_down_as_pytorchs_does(times: float) -> None:
    scales, parameters = overflowing_run(GradScaler("cpu"), times)
    reference, their_parameters = overflowing_run(torch.amp.GradScaler("cpu"), times)
    assert scales == reference
    assert scales[-1] < STOPPED, "the run is to need more than eight backoffs"
    assert all(torch.equal(one, other) for one, other in zip(parameters, their_parameters, strict=True))


class Through(torch.autograd.Function):
    """A function whose insides autograd does not show."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def nan_in_loss(weight: Tensor) -> Tensor:
    return (weight * torch.nan).sum()


def nan_in_backward(weight: Tensor) -> Tensor:
    return (weight * 0).sqrt().sum()  # 0, and its gradient 0 * Inf


def nan_in_half(weight: Tensor) -> Tensor:
    return (weight.half() * 0).sqrt().sum().float()


def nan_out_of_sight(weight: Tensor) -> Tensor:
    return Through.apply((weight * 0).sqrt()).sum()


def scales_of(
    make_loss: Callable[[Tensor], Tensor], *, good_steps: int = 0, count: int = 20, **options: Any
) -> list[float]:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = GradScaler("cpu", **options)
    scales = []
    for step in range(good_steps + count):
        optimizer.zero_grad()
        scaler.scale(weight.sum() if step < good_steps else make_loss(weight)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("make_loss", [nan_in_loss, nan_in_backward])
def test_nan_that_no_scale_makes_stops_after_eight_backoffs(make_loss: Callable[[Tensor], Tensor]) -> None:
    assert scales_of(make_loss) == [START * 0.5 ** min(step, 8) for step in range(1, 21)]


@pytest.mark.parametrize("make_loss", [nan_in_loss, nan_in_backward, nan_in_half, nan_out_of_sight])
def test_after_a_step_that_was_made_any_nan_stops_after_eight(make_loss: Callable[[Tensor], Tensor]) -> None:
    assert scales_of(make_loss, good_steps=1)[1:] == [START * 0.5 ** min(step, 8) for step in range(1, 21)]


@pytest.mark.parametrize("make_loss", [nan_in_half, nan_out_of_sight])
def test_before_that_nan_that_may_be_an_overflow_goes_on_to_the_floor(make_loss: Callable[[Tensor], Tensor]) -> None:
    scales = scales_of(make_loss, min_scale=2.0**-2)
    assert scales == [max(START * 0.5**step, 2.0**-2) for step in range(1, 21)]


def test_pytorchs_rule_never_stops() -> None:
    assert scales_of(nan_in_loss, max_nan_backoffs=None)[-1] == START * 0.5**20


def test_the_count_begins_anew_after_an_inf_and_after_a_step() -> None:
    kinds = [*["nan"] * 8, "inf", *["nan"] * 8, "good", *["nan"] * 9]
    turn = iter(kinds)

    def make_loss(weight: Tensor) -> Tensor:
        return (weight * {"nan": torch.nan, "inf": torch.inf, "good": 1.0}[next(turn)]).sum()

    scales = scales_of(make_loss, count=len(kinds), min_scale=2.0**-40)
    assert scales[16] == START * 0.5**17
    assert scales[-1] == START * 0.5**25
    assert scales[-2] == scales[-1]


def test_the_warning_names_the_parameter_once_in_a_run_of_nan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mezzo.torch.scaler"):
        scales_of(nan_in_loss, count=12)
    (record,) = caplog.records
    message = record.getMessage()
    assert "for 9 iteration(s) in a row" in message
    assert "param_groups[0]['params'][0]: 3 NaN, 0 Inf of 3 (float32)" in message


def test_another_rank_or_optimizer_with_inf_makes_it_an_overflow() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD([second], lr=0.1)]
    scaler = GradScaler("cpu")
    for _ in range(12):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale((first * torch.nan).sum() + (second * torch.inf).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == START * 0.5**12
