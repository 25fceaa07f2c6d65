"""Calls in an order that has no meaning are errors that say what to do; what has a meaning is none."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import tensorplay as tp

from mezzo.errors import MezzoError, ScalerProtocolError, ScalingError
from mezzo.tensorplay import GradScaler

from .runs import iterate, make, scaler_of


def scaled(name: str = "SGD") -> tuple[GradScaler, Any, Any]:
    weight, optimizer = make(name)
    scaler = scaler_of()
    scaler.scale((weight * weight).sum()).backward()
    return scaler, optimizer, weight


@pytest.mark.parametrize("method", ["step", "unscale_", "update"])
def test_nothing_goes_before_the_first_scale(method: str) -> None:
    _, optimizer = make("SGD")
    scaler = scaler_of()
    call = getattr(scaler, method)
    with pytest.raises(
        ScalerProtocolError, match=rf"Attempted {method} but _scale is None\..*scale\(loss\)\.backward\(\)"
    ):
        call() if method == "update" else call(optimizer)


def test_the_errors_are_those_that_the_package_raises_too() -> None:
    # RuntimeError for an order without meaning, AssertionError for what is missing, ValueError for float16.
    assert issubclass(ScalerProtocolError, RuntimeError)
    assert issubclass(ScalerProtocolError, AssertionError)
    assert issubclass(ScalingError, ValueError)
    assert issubclass(ScalerProtocolError, MezzoError)


def test_step_twice() -> None:
    scaler, optimizer, _ = scaled()
    scaler.step(optimizer)
    with pytest.raises(
        ScalerProtocolError, match=r"step\(\) has already been called since the last update\(\)\. Call update"
    ):
        scaler.step(optimizer)


def test_unscale_twice() -> None:
    scaler, optimizer, weight = scaled()
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerProtocolError, match=r"already been called on this optimizer .* once per iteration"):
        scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [2.0, -4.0, 6.0]


def test_unscale_after_step() -> None:
    scaler, optimizer, _ = scaled()
    scaler.step(optimizer)
    with pytest.raises(ScalerProtocolError, match=r"unscale_\(\) is being called after step\(\)\. Call it before step"):
        scaler.unscale_(optimizer)


def test_update_without_a_step() -> None:
    scaler, optimizer, _ = scaled()
    with pytest.raises(ScalerProtocolError, match=r"No inf checks were recorded prior to update\. Call scaler\.step"):
        scaler.update()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(ScalerProtocolError, match="No inf checks"):
        scaler.update()


def test_update_after_unscale_alone_counts() -> None:
    scaler, optimizer, weight = scaled()
    weight.grad = tp.tensor([float("inf")] * 3)
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15


def test_a_backward_pass_after_unscale_is_refused() -> None:
    scaler, optimizer, weight = scaled()
    scaler.unscale_(optimizer)
    scaler.scale((weight * weight).sum()).backward()
    with pytest.raises(
        ScalerProtocolError, match=r"1 gradient\(s\), such as that of param_groups.*after the last backward"
    ):
        scaler.step(optimizer)
    assert weight.tolist() == [1.0, -2.0, 3.0]


def test_a_backward_pass_after_an_unscale_that_had_nothing_to_do() -> None:
    weight, optimizer = make("SGD")
    scaler = scaler_of()
    scaler.scale(tp.ones(()))
    scaler.unscale_(optimizer)
    scaler.scale((weight * weight).sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [0.75, -1.5, 2.25]


def test_another_loss_after_unscale_is_none_of_its_business() -> None:
    scaler, optimizer, weight = scaled()
    other, second = make("Adam")
    scaler.unscale_(optimizer)
    scaler.scale((other * other).sum()).backward()
    tp.nn.utils.clip_grad_norm_([weight], 0.5)
    scaler.step(optimizer)
    scaler.step(second)
    scaler.update()
    assert scaler.stepped(optimizer)
    assert scaler.stepped(second)


def test_clipping_between_unscale_and_step() -> None:
    weight, optimizer = make("SGD", 3.0, 4.0)
    scaler = scaler_of()
    scaler.scale((weight * weight).sum() * 0.5).backward()
    scaler.unscale_(optimizer)
    assert tp.nn.utils.clip_grad_norm_([weight], 1.0).item() == 5.0
    scaler.step(optimizer)
    # The gradient is (3, 4) clipped to a norm of 1, the rate 1/8; clipping divides by the norm and a millionth.
    assert weight.tolist() == pytest.approx([3.0 - 0.075, 4.0 - 0.1], rel=1e-6)


def test_gradients_put_there_by_hand_after_unscale_are_taken_as_they_are() -> None:
    scaler, optimizer, weight = scaled()
    scaler.unscale_(optimizer)
    weight.grad = tp.tensor([8.0, 8.0, 8.0])
    scaler.step(optimizer)
    assert weight.tolist() == [0.0, -3.0, 2.0]


def test_gradients_with_a_graph_are_divided_outside_of_it() -> None:
    weight, optimizer = make("SGD")
    scaler = scaler_of()
    scaler.scale((weight**3).sum()).backward(create_graph=True)
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [3.0, 12.0, 27.0]
    scaler.step(optimizer)
    assert scaler.stepped(optimizer)


# Without gradients


def test_an_iteration_without_gradients_is_told_and_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    weight, optimizer = make("Adam")
    scaler = scaler_of()
    scaler.scale(tp.ones(()))
    with caplog.at_level(logging.WARNING, "mezzo.tensorplay.scaler"):
        for _ in range(3):
            scaler.step(optimizer)
            scaler.update()
    [record] = caplog.records
    assert (
        "No step was made: Adam has 1 parameter(s), 1 of which require gradients, and 0 have one" in record.getMessage()
    )
    assert "the loss has no path to them, or the optimizer was made from other parameters" in record.getMessage()
    assert not scaler.stepped(optimizer)
    assert scaler.get_scale() == 2.0**16
    assert scaler._get_growth_tracker() == 0
    assert dict(optimizer.state) == {}
    iterate(scaler, optimizer, weight)
    assert scaler.stepped(optimizer)


def test_it_is_told_again_after_gradients_came_and_went(caplog: pytest.LogCaptureFixture) -> None:
    weight, optimizer = make("SGD")
    scaler = scaler_of()
    iterate(scaler, optimizer, weight)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.step(optimizer)
        scaler.update()
        iterate(scaler, optimizer, weight)
    assert len(caplog.records) == 2


def test_frozen_parameters_are_called_so(caplog: pytest.LogCaptureFixture) -> None:
    weight, optimizer = make("SGD")
    weight.requires_grad_(False)
    scaler = scaler_of()
    scaler.scale(tp.ones(()))
    scaler.step(optimizer)
    assert "0 of which require gradients, and 0 have one. The scale stays. Either all of them are frozen" in caplog.text


def test_gradients_may_come_after_a_step_that_had_none(caplog: pytest.LogCaptureFixture) -> None:
    weight, optimizer = make("SGD")
    scaler = scaler_of()
    scaler.scale(tp.ones(()))
    scaler.step(optimizer)
    scaler.scale((weight * weight).sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [0.75, -1.5, 2.25]
    assert len(caplog.records) == 1


def test_an_optimizer_without_gradients_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    scaler, optimizer, _ = scaled()
    _, idle = make("SGD")
    scaler.step(idle)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.stepped(idle), scaler.stepped(optimizer)) == (False, True)
    assert scaler._get_growth_tracker() == 1
    assert len(caplog.records) == 1
