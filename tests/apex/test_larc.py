"""LARC: the rates of the paper, what Apex added, and what it hands to its optimizer."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.apex import amp
from mezzo.apex.parallel import LARC

# Scaled by the 2**16 of the start, a gradient of 1 is too large for float16.
SCALE: dict[str, Any] = {"max_loss_scale": 2.0**8}


def larc_by_hand(weight: Tensor, slope: Tensor, *, lr: float, decay: float, clip: bool, trust: float) -> Tensor:
    """The update of the paper, without momentum, and its clipping."""
    size = weight.norm()
    local = trust * size / (slope.norm() + decay * size + 1e-8)
    rate = min(local.item(), lr) if clip else local.item() * lr
    return weight - rate * (slope + decay * weight)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("lr", [0.001, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_larc_is_that_of_the_paper(clip: bool, decay: float, lr: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(3, 4, dtype=dtype)), nn.Parameter(100 * torch.randn(5, dtype=dtype))]
    optimizer = LARC(torch.optim.SGD(weights, lr=lr, weight_decay=decay), trust_coefficient=0.1, clip=clip)
    expected = []
    for one in weights:
        one.grad = torch.randn_like(one)
        before = one.detach().clone()
        expected.append(larc_by_hand(before, one.grad, lr=lr, decay=decay, clip=clip, trust=0.1))
    optimizer.step()
    for one, wanted in zip(weights, expected, strict=True):
        # What differs is the order of a few operations; where weight and update nearly cancel, their roundings are left.
        rtol, atol = (1e-5, 1e-4) if dtype is torch.float32 else (1e-12, 1e-12)
        torch.testing.assert_close(one.detach(), wanted, rtol=rtol, atol=atol)
    assert optimizer.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_where_a_norm_is_zero_larc_changes_nothing(zero: str) -> None:
    weight = nn.Parameter(torch.zeros(2) if zero == "weight" else torch.ones(2))
    weight.grad = torch.zeros(2) if zero == "gradient" else torch.ones(2)
    without = nn.Parameter(torch.ones(1))
    LARC(torch.optim.SGD([weight, without], lr=0.5, weight_decay=0.1)).step()
    assert weight.tolist() == ([1.0, 1.0] if zero == "gradient" else [-0.5, -0.5])
    assert without.grad is None


def test_norms_of_large_float16_gradients_are_finite() -> None:
    weight = nn.Parameter(torch.full((4,), 1000.0, dtype=torch.float16))
    weight.grad = torch.full((4,), 1000.0, dtype=torch.float16)
    LARC(torch.optim.SGD([weight], lr=1.0), trust_coefficient=0.25, clip=False).step()
    assert weight.tolist() == [750.0] * 4


def test_larc_hands_everything_else_to_its_optimizer() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    optimizer = LARC(inner)
    assert not isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    optimizer.add_param_group({"params": [other]})
    weight.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state is inner.state
    assert optimizer.state[weight]["momentum_buffer"] is not None
    assert optimizer.defaults is inner.defaults
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad.tolist() == [0.0, 0.0]
    optimizer.zero_grad()
    assert weight.grad is None
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.125
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.125
    assert repr(optimizer).startswith("LARC(SGD (")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = optimizer.nothing


@pytest.mark.parametrize("way", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_larc_can_be_copied(way: Any) -> None:
    optimizer = LARC(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5), trust_coefficient=0.5, clip=False, eps=0.1)
    other = way(optimizer)
    assert (other.trust_coefficient, other.clip, other.eps) == (0.5, False, 0.1)
    assert other.param_groups[0]["lr"] == 0.5
    assert other.optim is not optimizer.optim


def test_a_closure_is_called_once_before_the_gradients_are_changed() -> None:
    weight = nn.Parameter(torch.full((4,), 1.0))
    optimizer = LARC(torch.optim.SGD([weight], lr=1.0), trust_coefficient=0.5, clip=False)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (2 * weight).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert (calls, loss.item()) == ([True], 8.0)
    assert weight.tolist() == [0.5] * 4  # a rate of 0.5 * 2 / 4, a gradient of 2


def test_the_decay_is_put_back_after_a_step_that_raises() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = LARC(torch.optim.SGD([weight], lr=0.5, weight_decay=0.25))

    def fail(*_: object) -> None:
        assert optimizer.param_groups[0]["weight_decay"] == 0.0
        raise RuntimeError("no step")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_larc_goes_through_amp(level: str) -> None:
    """Weights and gradients that float16 has exactly: all levels make the same first step, and skip the same second."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=1.0), trust_coefficient=0.5)
    model, same = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0, **SCALE)
    assert same is optimizer
    for factor in (2.0, math.inf):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 4)).sum() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    # The norms are 2 and 4, so the local rate is a quarter.
    torch.testing.assert_close(model.weight.float(), torch.full((1, 4), 0.5), rtol=1e-6, atol=0)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**7
