"""Gradients that come by ways that PyTorch's scaler knows nothing of: late, by hand, with a closure that brings none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.torch import GradScaler


def test_a_shared_parameter_is_unscaled_once_after_a_late_backward_pass() -> None:
    shared, own = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first, second = torch.optim.SGD([shared, own], lr=0.5), torch.optim.SGD([shared], lr=0.5)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(shared.sum() + own.sum()).backward()
    scaler.unscale_(first)
    scaler.unscale_(second)
    scaler.scale((3 * shared).sum()).backward()
    assert shared.grad.tolist() == [4.0, 4.0]
    assert own.grad.tolist() == [1.0, 1.0]
    scaler.step(first)
    scaler.step(second)
    assert shared.tolist() == [-3.0, -3.0]
    assert own.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("give", [lambda closure: ((closure,), {}), lambda closure: ((), {"closure": closure})])
def test_a_closure_that_only_tells_the_loss_of_gradients_that_are_there(
    give: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]], unscaled: bool
) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu", init_scale=1024.0)
    loss = (weight * 3).sum()
    scaler.scale(loss).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    args, kwargs = give(lambda: loss)
    assert scaler.step(optimizer, *args, **kwargs) is loss
    assert weight.tolist() == [-0.5, -0.5]


def test_a_closure_that_does_not_scale_is_taken_at_its_word() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    scaler.step(optimizer, closure)
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("factor", [1.0, torch.inf])
def test_an_optimizer_that_ignores_its_closure(factor: float) -> None:
    class Deaf(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()

    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = Deaf([weight], lr=0.5), GradScaler("cpu", init_scale=1024.0)
    scaler.scale((weight * factor).sum()).backward()
    scaler.step(optimizer, lambda: 0.0)
    assert scaler.stepped(optimizer) == (factor == 1.0)
    assert weight.tolist() == ([0.5, 0.5] if factor == 1.0 else [1.0, 1.0])


def test_gradients_put_there_by_hand_after_an_unscale_that_found_none() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu", init_scale=1024.0)
    (gradient,) = torch.autograd.grad(scaler.scale(weight.square().sum() / 2), weight)
    scaler.unscale_(optimizer)
    weight.grad = gradient
    scaler.step(optimizer)
    assert scaler.stepped(optimizer)
    assert weight.tolist() == [0.5, 0.5]


def test_factors_of_one_freeze_the_scale() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.set_growth_factor(1.0)
    scaler.set_backoff_factor(1.0)
    other = GradScaler("cpu")
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 8.0
    other.load_state_dict(scaler.state_dict())
    assert (other.get_growth_factor(), other.get_backoff_factor()) == (1.0, 1.0)


def test_none_under_a_name_stays() -> None:
    scaled = GradScaler("cpu", init_scale=8.0).scale({"loss": torch.ones(()), "aux": None})
    assert scaled["loss"].item() == 8.0
    assert scaled["aux"] is None
    for outputs in (None, [None], {"aux": [None]}):
        with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors; got None"):
            GradScaler("cpu").scale(outputs)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scale_that_others_have_written_is_not_trusted(fused: bool) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5, fused=fused), GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler._scale.fill_(2.0**-20)
    weight.grad = torch.full((2,), 1e38)  # finite, and not after it was divided
    scaler.step(optimizer)
    assert not scaler.stepped(optimizer)
    assert weight.tolist() == [0.5, 0.5]
