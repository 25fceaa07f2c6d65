"""Optimizers that call a closure: each evaluation is unscaled, and one that is not finite undoes the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import tensorplay as tp

from mezzo.errors import ScalerProtocolError
from mezzo.tensorplay import GradScaler

from .runs import OPTIMIZERS, bits, parameter, scaler_of, snapshot


def closure_of(
    scaler: GradScaler | None,
    optimizer: Any,
    weight: Any,
    factors: Any = (),
    *,
    returns: str = "loss",
    zero: bool = True,
) -> Callable[[], Any]:
    """Make the closure of a quadratic; the loss of each call is multiplied by the next factor, then by 1."""
    left = list(factors)

    def closure() -> Any:
        if zero:
            optimizer.zero_grad()
        loss = ((weight - 1) ** 2).sum() * (left.pop(0) if left else 1.0)
        scaled = loss if scaler is None else scaler.scale(loss)
        scaled.backward()
        return scaled if returns == "scaled" else loss

    return closure


def lbfgs(weight: Any, line_search: str | None = None) -> Any:
    return tp.optim.LBFGS([weight], lr=0.5, max_iter=4, line_search_fn=line_search)


@pytest.mark.parametrize("returns", ["loss", "scaled"])
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_steps_as_without_a_scaler(line_search: str | None, by_keyword: bool, returns: str) -> None:
    weight, other = parameter(3.0, -2.0), parameter(3.0, -2.0)
    optimizer, plain = lbfgs(weight, line_search), lbfgs(other, line_search)
    scaler = scaler_of()
    for _ in range(3):
        closure = closure_of(scaler, optimizer, weight, returns=returns)
        loss = scaler.step(optimizer, closure=closure) if by_keyword else scaler.step(optimizer, closure)
        scaler.update()
        expected = plain.step(closure_of(None, plain, other))
        assert loss.item() == expected.item()
    assert bits(weight) == bits(other)
    assert scaler.steps_taken(optimizer) == 3
    assert scaler._get_growth_tracker() == 3


@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=["inf", "nan"])
@pytest.mark.parametrize("finite_first", [0, 1, 3])
def test_an_evaluation_that_is_not_finite_undoes_the_step(finite_first: int, bad: float) -> None:
    weight = parameter(3.0, -2.0)
    optimizer = lbfgs(weight)
    scaler = scaler_of()
    scaler.step(optimizer, closure_of(scaler, optimizer, weight))
    scaler.update()
    before = snapshot(optimizer)
    assert scaler.step(optimizer, closure_of(scaler, optimizer, weight, [1.0] * finite_first + [bad])) is None
    scaler.update()
    assert snapshot(optimizer) == before
    assert not scaler.stepped(optimizer)
    assert scaler.get_scale() == 2.0**15
    assert [one.numel for one in scaler.nonfinite(optimizer)] == [2]
    scaler.step(optimizer, closure_of(scaler, optimizer, weight))
    assert scaler.stepped(optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_take_a_closure_too(name: str) -> None:
    weight, other = parameter(3.0, -2.0), parameter(3.0, -2.0)
    optimizer, plain = OPTIMIZERS[name]([weight]), OPTIMIZERS[name]([other])
    scaler = scaler_of()
    before = snapshot(optimizer)
    assert scaler.step(optimizer, closure_of(scaler, optimizer, weight, [math.inf])) is None
    assert snapshot(optimizer) == before
    scaler.update()
    for _ in range(2):
        loss = scaler.step(optimizer, closure_of(scaler, optimizer, weight))
        scaler.update()
        assert loss.item() == plain.step(closure_of(None, plain, other)).item()
    assert bits(weight) == bits(other)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


def test_a_closure_may_add_to_what_is_there() -> None:
    weight, other = parameter(3.0), parameter(3.0)
    optimizer, plain = lbfgs(weight), lbfgs(other)
    scaler = scaler_of()
    scaler.scale((weight * 2).sum()).backward()
    (other * 2).sum().backward()
    scaler.step(optimizer, closure_of(scaler, optimizer, weight, zero=False))
    plain.step(closure_of(None, plain, other, zero=False))
    assert bits(weight) == bits(other)
    assert bits(weight.grad) == bits(other.grad)


def test_a_closure_may_add_to_what_the_last_iteration_left() -> None:
    weight, other = parameter(3.0), parameter(3.0)
    optimizer, plain = tp.optim.SGD([weight], lr=0.125), tp.optim.SGD([other], lr=0.125)
    scaler = scaler_of()
    for _ in range(3):
        scaler.step(optimizer, closure_of(scaler, optimizer, weight, zero=False))
        scaler.update()
        plain.step(closure_of(None, plain, other, zero=False))
    assert bits(weight) == bits(other)


def test_a_closure_may_only_tell_the_loss() -> None:
    weight = parameter(3.0)
    optimizer = tp.optim.SGD([weight], lr=0.5)
    scaler = scaler_of()
    loss = ((weight - 1) ** 2).sum()
    scaler.scale(loss).backward()
    assert scaler.step(optimizer, lambda: loss) is loss
    assert weight.tolist() == [1.0]


@pytest.mark.parametrize("scaled_before", [False, True])
def test_a_closure_that_does_not_scale_is_refused(scaled_before: bool) -> None:
    weight = parameter(3.0)
    optimizer = lbfgs(weight)
    scaler = scaler_of()
    if scaled_before:
        scaler.scale((weight * 2).sum()).backward()
    before = snapshot(optimizer)
    with pytest.raises(
        ScalerProtocolError, match=r"a loss that was not scaled\. Call scaler\.scale\(loss\)\.backward\(\) in"
    ):
        scaler.step(optimizer, closure_of(None, optimizer, weight))
    assert snapshot(optimizer) == before


def test_an_error_in_a_closure_undoes_the_step_and_comes_through() -> None:
    weight = parameter(3.0)
    optimizer = lbfgs(weight)
    scaler = scaler_of()
    before = snapshot(optimizer)
    calls: list[int] = []

    def closure() -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return closure_of(scaler, optimizer, weight)()

    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer, closure)
    assert snapshot(optimizer) == before
    # What is there is the gradient of the first evaluation, and whether it is scaled is known.
    scaler.unscale_(optimizer)
    assert math.isfinite(weight.grad.item())
    assert abs(weight.grad.item()) <= 4.0


class Restless(tp.optim.SGD):  # type: ignore[misc]
    """Changes its own numbers before it evaluates anything."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


def test_the_optimizers_numbers_are_put_back_too() -> None:
    weight = parameter(3.0)
    optimizer = Restless([weight], lr=0.5)
    scaler = scaler_of()
    scaler.step(optimizer, closure_of(scaler, optimizer, weight, [math.inf]))
    assert optimizer.param_groups[0]["lr"] == 0.5
    scaler.update()
    scaler.step(optimizer, closure_of(scaler, optimizer, weight))
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert weight.tolist() == [2.0]


def test_a_second_step_is_refused_with_a_closure_too() -> None:
    weight = parameter(3.0)
    optimizer = lbfgs(weight)
    scaler = scaler_of()
    scaler.step(optimizer, closure_of(scaler, optimizer, weight))
    with pytest.raises(ScalerProtocolError, match=r"step\(\) has already been called"):
        scaler.step(optimizer, closure_of(scaler, optimizer, weight))


def test_a_closure_without_gradients_is_told(caplog: pytest.LogCaptureFixture) -> None:
    weight = parameter(3.0)
    optimizer = tp.optim.SGD([weight], lr=0.5)
    scaler = scaler_of()
    scaler.step(optimizer, lambda: scaler.scale(tp.ones(())))
    assert "No step was made: SGD has 1 parameter(s)" in caplog.text
    assert not scaler.stepped(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**16
