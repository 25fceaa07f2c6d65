"""The numbers of a scaler: checked when it is made, and set later."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorplay as tp

from mezzo.errors import ScalingError
from mezzo.tensorplay import GradScaler

from .runs import iterate, make, scaler_of


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"growth_factor": 1.0}, r"The growth factor must be > 1\.0\."),
        ({"backoff_factor": 1.0}, r"The backoff factor must be < 1\.0\."),
        ({"init_scale": 0.0}, "init_scale must be finite in float32"),
        ({"growth_interval": 0}, "growth_interval must be a whole number"),
        ({"max_scale": 1.0, "min_scale": 2.0}, "max_scale must not be below min_scale"),
        ({"max_nan_backoffs": -1}, "max_nan_backoffs must be a whole number"),
    ],
)
def test_numbers_that_cannot_work_are_refused(numbers: dict[str, Any], text: str) -> None:
    with pytest.raises(ScalingError, match=text):
        GradScaler("cpu", **numbers)
    assert not GradScaler("cpu", enabled=False, **numbers).is_enabled()


def test_numbers_can_be_set_and_frozen() -> None:
    scaler = scaler_of(init_scale=64.0)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 1)
    weight, optimizer = make("SGD")
    iterate(scaler, optimizer, weight)
    assert scaler.get_scale() == 256.0
    iterate(scaler, optimizer, weight, math.inf)
    assert scaler.get_scale() == 64.0
    scaler.set_growth_factor(1)
    scaler.set_backoff_factor(1.0)
    for factor in (1.0, math.inf, math.nan):
        iterate(scaler, optimizer, weight, factor)
        assert scaler.get_scale() == 64.0
    again = scaler_of()
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    ("setter", "wrong"), [("growth_factor", 0.9), ("backoff_factor", 1.1), ("growth_interval", 0.5)]
)
def test_a_number_that_cannot_work_is_not_set(setter: str, wrong: float) -> None:
    scaler = scaler_of()
    before = scaler.state_dict()
    with pytest.raises(ScalingError, match=setter.replace("_", ".")):
        getattr(scaler, f"set_{setter}")(wrong)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    "new", [128.0, 128, tp.tensor(128.0), tp.tensor([128.0])], ids=["float", "int", "0-dim", "1-dim"]
)
def test_a_scale_can_be_set(new: Any) -> None:
    scaler = scaler_of()
    scaler.scale(tp.ones(()))
    scaler.update(new)
    assert scaler.get_scale() == 128.0
    assert scaler.scale(tp.ones(())).item() == 128.0


def test_a_scale_that_is_set_leaves_the_tracker() -> None:
    scaler = scaler_of()
    weight, optimizer = make("SGD")
    iterate(scaler, optimizer, weight)
    scaler.update(128.0)
    assert scaler._get_growth_tracker() == 1


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (0.0, "new_scale must be finite in float32"),
        (math.nan, "new_scale must be finite in float32"),
        ("much", "new_scale must be finite in float32"),
        (tp.ones(2), r"new_scale should be a float or a 1-element tensor.*shape \(2,\)"),
        (tp.nn.Parameter(tp.ones(1)), "requires_grad=True"),
    ],
)
def test_a_scale_that_is_none_is_not_set(new: Any, text: str) -> None:
    scaler = scaler_of()
    scaler.scale(tp.ones(()))
    with pytest.raises(ScalingError, match=text):
        scaler.update(new)
    assert scaler.get_scale() == 2.0**16


def test_a_loss_that_waits_for_its_backward_pass_keeps_its_scale() -> None:
    weight, _ = make("SGD", 1.0)
    scaler = scaler_of(init_scale=8.0)
    waiting = scaler.scale((weight * 3).sum())
    scaler.update(2.0)
    waiting.backward()
    assert weight.grad.tolist() == [24.0]
