"""The contract with optimizers that unscale and skip by themselves: what they are shown, and what is put back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from mezzo.torch import GradScaler

from .optimizers import ABSENT, Watched, backward, parameter, shown


def test_the_optimizer_is_shown_the_scale_and_a_verdict_where_gradients_are_still_scaled() -> None:
    weight = parameter()
    optimizer = Watched([weight], lr=0.5, momentum=0.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight, 2.0)
    scaler.step(optimizer)
    (seen,) = optimizer.seen
    torch.testing.assert_close(seen["grad_scale"], torch.tensor(8.0), rtol=0, atol=0)
    torch.testing.assert_close(seen["found_inf"], torch.tensor(0.0), rtol=0, atol=0)
    torch.testing.assert_close(weight.detach(), torch.tensor([0.0, 1.0]), rtol=0, atol=0)


def test_no_scale_is_shown_where_gradients_are_unscaled_already() -> None:
    weight = parameter()
    optimizer = Watched([weight], lr=0.5, momentum=0.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight, 2.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    (seen,) = optimizer.seen
    assert seen["grad_scale"] is None
    torch.testing.assert_close(seen["found_inf"], torch.tensor(0.0), rtol=0, atol=0)
    torch.testing.assert_close(weight.detach(), torch.tensor([0.0, 1.0]), rtol=0, atol=0)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_is_shown_and_the_step_still_called(explicit: bool, bad: float) -> None:
    weight = parameter()
    optimizer = Watched([weight])
    optimizer.answer = "mine"
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight)
    weight.grad[1] = bad
    if explicit:
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer) == "mine"
    scaler.update()
    torch.testing.assert_close(optimizer.seen[0]["found_inf"], torch.tensor(1.0), rtol=0, atol=0)
    assert weight.tolist() == [1.0, 2.0]
    assert not scaler.stepped(optimizer)
    assert scaler.steps_taken(optimizer) == 0
    assert scaler.get_scale() == 4.0


class WithClassAttributes(Watched):
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


def test_attributes_of_the_class_stay_as_they_are() -> None:
    weight = parameter()
    optimizer = WithClassAttributes([weight], lr=0.5, momentum=0.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight, 2.0)
    scaler.step(optimizer)
    assert optimizer.seen[0]["grad_scale"].item() == 8.0
    assert shown(optimizer) == {}
    assert WithClassAttributes.grad_scale is None
    assert WithClassAttributes.found_inf is None
    assert weight.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("explicit", [False, True])
def test_a_users_own_grad_scale_is_multiplied_in_and_put_back(explicit: bool) -> None:
    weight = parameter()
    optimizer = Watched([weight], lr=0.5, momentum=0.0)
    mine, verdict = torch.tensor(4.0), torch.tensor(0.0)
    optimizer.grad_scale, optimizer.found_inf = mine, verdict
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        backward(scaler, weight, 8.0)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert [seen["grad_scale"].item() for seen in optimizer.seen] == [4.0 if explicit else 32.0] * 2
    assert shown(optimizer) == {"grad_scale": mine, "found_inf": verdict}
    assert (shown(optimizer)["grad_scale"] is mine, mine.item()) == (True, 4.0)
    # Two steps of 0.5 with gradients of 8 / 4.
    assert weight.tolist() == [-1.0, 0.0]


def test_a_grad_scale_that_is_a_number_is_multiplied_in() -> None:
    weight = parameter()
    optimizer = Watched([weight], lr=0.5, momentum=0.0)
    optimizer.grad_scale = 4.0
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight, 8.0)
    scaler.step(optimizer)
    assert isinstance(optimizer.seen[0]["grad_scale"], Tensor)
    assert optimizer.seen[0]["grad_scale"].item() == 32.0
    assert shown(optimizer) == {"grad_scale": 4.0}


@pytest.mark.parametrize("preset", [False, True], ids=["nothing set", "grad_scale set"])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_step_that_raises_leaves_all_as_it_was_and_can_be_made_again(explicit: bool, preset: bool) -> None:
    weight = parameter()
    optimizer = Watched([weight], lr=0.5, momentum=0.0)
    if preset:
        optimizer.grad_scale = torch.tensor(1.0)
    before = shown(optimizer)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight, 2.0)
    if explicit:
        scaler.unscale_(optimizer)
    stage = copy.copy(scaler._per_optimizer_states[id(optimizer)]["stage"])
    optimizer.failing = True
    with pytest.raises(ArithmeticError, match="no step today"):
        scaler.step(optimizer)
    assert shown(optimizer) == before
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is stage
    optimizer.failing = False
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, 1.0]
    assert scaler.steps_taken(optimizer) == 1
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("explicit", [False, True])
def test_without_gradients_nothing_happens(explicit: bool) -> None:
    weight, idle = parameter(), parameter()
    busy, optimizer = Watched([weight]), Watched([idle])
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight)
    if explicit:
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer) is None
    scaler.step(busy)
    scaler.update()
    assert idle.tolist() == [1.0, 2.0]
    assert optimizer.state == {}
    assert shown(optimizer) == {}
    assert [type(seen["found_inf"]) for seen in optimizer.seen] in ([], [Tensor])
    assert scaler.steps_taken(optimizer) == 0
    assert scaler.steps_taken(busy) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "overflow"])
def test_the_verdict_is_a_float32_number_whatever_the_gradients_are(
    dtype: torch.dtype, explicit: bool, bad: bool
) -> None:
    weights = [parameter(dtype=dtype), parameter()]
    optimizer = Watched(weights)
    scaler = GradScaler("cpu", init_scale=8.0)
    for weight in weights:
        backward(scaler, weight)
    if bad:
        weights[0].grad[0] = float("inf")
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    verdict = optimizer.seen[0]["found_inf"]
    assert (verdict.dtype, verdict.shape, verdict.item()) == (torch.float32, (), float(bad))


def test_arguments_and_results_are_passed_on() -> None:
    weight = parameter()
    optimizer = Watched([weight])
    optimizer.answer = {"loss": 3.0}
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight)
    assert scaler.step(optimizer, 0.5, note="now") is optimizer.answer
    assert optimizer.called_with == [((0.5,), {"note": "now"})]


def test_arguments_and_results_are_passed_on_without_the_contract() -> None:
    weight = parameter()
    optimizer = Watched([weight], scaled=False)
    optimizer.answer = {"loss": 3.0}
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight)
    assert scaler.step(optimizer, 0.5, note="now") is optimizer.answer
    assert optimizer.called_with == [((0.5,), {"note": "now"})]
    assert optimizer.seen == [{"grad_scale": ABSENT, "found_inf": ABSENT}]
    scaler.update()
    backward(scaler, weight, float("inf"))
    assert scaler.step(optimizer) is None
    assert len(optimizer.called_with) == 1


def test_a_scaler_that_is_switched_off_shows_nothing() -> None:
    weight = parameter()
    optimizer = Watched([weight], lr=0.5, momentum=0.0)
    scaler = GradScaler("cpu", enabled=False)
    backward(scaler, weight, 2.0)
    scaler.step(optimizer)
    assert optimizer.seen == [{"grad_scale": ABSENT, "found_inf": ABSENT}]
    assert weight.tolist() == [0.0, 1.0]


def test_the_verdict_of_a_step_is_not_changed_by_the_next() -> None:
    """What an author keeps of `found_inf` is that step's, whatever `update` and later steps write."""
    weight = parameter()
    optimizer = Watched([weight])
    scaler = GradScaler("cpu", init_scale=8.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        backward(scaler, weight, factor)
        scaler.step(optimizer)
        scaler.update()
    assert [seen["found_inf"].item() for seen in optimizer.seen] == [1.0, 0.0]
    assert [seen["grad_scale"].item() for seen in optimizer.seen] == [8.0, 4.0]
