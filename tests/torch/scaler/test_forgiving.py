"""Orders of calls that PyTorch's scaler refuses, or after which it steps with wrong numbers, have a meaning here.

Each test compares with training that has no scaler: gradients and parameters are those, bit for bit, since scales that
are powers of two scale and unscale float32 without rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo import ScalerProtocolError
from mezzo.torch import GradScaler

from .runs import INF, NAN, assert_same, each_loop, make_batches, make_net, make_optimizer, parameters_of

NO_CHECKS = "No inf checks were recorded for this optimizer."
set_to_none = pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in net.parameters()]


def plain_gradients(batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Compute the gradients of the sum of the losses, one backward after another."""
    net = make_net()
    for batch in batches:
        loss_of(net, batch).backward()
    return gradients(net)


def plain_parameters(loop: str, batches: Iterable[Iterable[tuple[Tensor, Tensor]]]) -> list[Tensor]:
    """Train without a scaler: one step for each list of batches."""
    net = make_net()
    optimizer = make_optimizer("adam", loop, net.parameters())
    for step in batches:
        optimizer.zero_grad()
        for batch in step:
            loss_of(net, batch).backward()
        optimizer.step()
    return parameters_of(net)


class Training:
    def __init__(self, loop: str = "for-loop", **numbers: Any) -> None:
        self.net = make_net()
        self.optimizer = make_optimizer("adam", loop, self.net.parameters())
        self.scaler = GradScaler("cpu", **{"init_scale": 2.0**10, **numbers})

    def backward(self, batch: tuple[Tensor, Tensor], factor: float = 1.0) -> None:
        self.scaler.scale(loss_of(self.net, batch) * factor).backward()

    def finish(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def parameters(self) -> list[Tensor]:
        return parameters_of(self.net)


# No gradients


@each_loop
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_an_optimizer_without_gradients_is_left_alone(loop: str, unscale: bool) -> None:
    one, before = Training(loop), parameters_of(make_net())
    (batch,) = make_batches(1)
    one.scaler.scale(torch.ones((), requires_grad=True)).backward()
    if unscale:
        one.scaler.unscale_(one.optimizer)
    assert one.scaler.step(one.optimizer) is None
    one.scaler.update()
    assert_same(one.parameters(), before)
    assert (one.scaler.get_scale(), one.scaler._get_growth_tracker()) == (1024.0, 0)
    one.backward(batch)
    one.finish()
    assert_same(one.parameters(), plain_parameters(loop, [[batch]]))


@each_loop
def test_an_idle_optimizer_does_not_hold_up_the_other(loop: str) -> None:
    one, idle = Training(loop, growth_interval=1), Training(loop)
    (batch,) = make_batches(1)
    one.backward(batch)
    one.scaler.step(idle.optimizer)
    one.finish()
    assert_same(one.parameters(), plain_parameters(loop, [[batch]]))
    assert_same(idle.parameters(), parameters_of(make_net()))
    assert one.scaler.get_scale() == 2048.0


@each_loop
def test_strict_says_how_many_parameters_have_no_gradient_and_why(loop: str) -> None:
    one = Training(loop, strict=True)
    one.net[0].bias.requires_grad_(False)
    one.scaler.scale(torch.ones((), requires_grad=True)).backward()
    with pytest.raises(ScalerProtocolError) as caught:
        one.scaler.step(one.optimizer)
    text = str(caught.value)
    assert isinstance(caught.value, AssertionError)
    assert text.startswith(NO_CHECKS)
    assert re.search(r"\b4 parameter.*\b3\b.*\brequire gradients, and 0 have one: the loss has no path to them", text)
    assert_same(one.parameters(), parameters_of(make_net()))


def test_strict_update_without_a_check_is_refused() -> None:
    one = Training(strict=True)
    one.scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError) as caught:
        one.scaler.update()
    assert str(caught.value).startswith("No inf checks were recorded prior to update.")
    assert isinstance(caught.value, ScalerProtocolError)


def test_update_without_a_check_leaves_scale_and_tracker() -> None:
    one = Training()
    (batch,) = make_batches(1)
    one.backward(batch)
    one.finish()
    one.scaler.update()
    assert (one.scaler.get_scale(), one.scaler._get_growth_tracker()) == (1024.0, 1)


# unscale_ more than once


@each_loop
@pytest.mark.parametrize("times", [2, 3])
def test_unscaling_again_does_nothing_more(loop: str, times: int) -> None:
    one = Training(loop)
    (batch,) = make_batches(1)
    one.backward(batch)
    for _ in range(times):
        one.scaler.unscale_(one.optimizer)
        assert_same(gradients(one.net), plain_gradients([batch]))
    one.finish()
    assert_same(one.parameters(), plain_parameters(loop, [[batch]]))


@pytest.mark.parametrize("factor", [INF, NAN], ids=str)
def test_unscaling_again_does_not_forget_what_was_found(factor: float) -> None:
    one = Training()
    (batch,) = make_batches(1)
    one.backward(batch, factor)
    one.scaler.unscale_(one.optimizer)
    one.scaler.unscale_(one.optimizer)
    one.finish()
    assert_same(one.parameters(), parameters_of(make_net()))
    assert one.scaler.get_scale() == 512.0


@each_loop
@set_to_none
def test_unscaling_at_every_micro_step_gives_the_plain_sum(loop: str, set_to_none: bool) -> None:
    one, batches = Training(loop), make_batches(6)
    for window in (batches[:3], batches[3:]):
        one.optimizer.zero_grad(set_to_none)
        for batch in window:
            one.backward(batch)
            one.scaler.unscale_(one.optimizer)
        one.finish()
    assert_same(one.parameters(), plain_parameters(loop, [batches[:3], batches[3:]]))


def test_gradients_are_true_after_every_unscale() -> None:
    one, batches = Training(), make_batches(3)
    for number, batch in enumerate(batches, 1):
        one.backward(batch)
        one.scaler.unscale_(one.optimizer)
        assert_same(gradients(one.net), plain_gradients(batches[:number]))


@each_loop
@pytest.mark.parametrize("after", [0, 1, 2])
def test_unscaling_in_the_midst_of_accumulation_gives_the_plain_sum(loop: str, after: int) -> None:
    one, batches = Training(loop), make_batches(4)
    for number, batch in enumerate(batches):
        one.backward(batch)
        if number == after:
            one.scaler.unscale_(one.optimizer)
    assert_same(gradients(one.net), plain_gradients(batches))
    one.finish()
    assert_same(one.parameters(), plain_parameters(loop, [batches]))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_inf_in_any_micro_step_skips_the_whole_window(at: int) -> None:
    one, batches = Training(), make_batches(3)
    for number, batch in enumerate(batches):
        one.backward(batch, INF if number == at else 1.0)
        one.scaler.unscale_(one.optimizer)
    one.finish()
    assert_same(one.parameters(), parameters_of(make_net()))
    assert one.scaler.get_scale() == 512.0


@each_loop
def test_unscaling_and_updating_at_every_micro_step_gives_the_plain_sum(loop: str) -> None:
    one, batches = Training(loop, growth_interval=1), make_batches(3)
    for number, batch in enumerate(batches):
        one.backward(batch)
        one.scaler.unscale_(one.optimizer)
        if number == 2:
            one.scaler.step(one.optimizer)
        one.scaler.update()
    assert_same(one.parameters(), plain_parameters(loop, [batches]))


@pytest.mark.parametrize("clipped", [False, True], ids=["plain", "clipped"])
def test_clipping_at_every_micro_step_works_on_true_gradients(clipped: bool) -> None:
    batches, norms = make_batches(3), []
    for scaled in (False, True):
        one = Training()
        for batch in batches:
            if scaled:
                one.backward(batch)
                one.scaler.unscale_(one.optimizer)
            else:
                loss_of(one.net, batch).backward()
            norms.append(nn.utils.clip_grad_norm_(one.net.parameters(), 0.5 if clipped else INF))
    assert_same(norms[3:], norms[:3])


# Abandoned iterations


def abandon(one: Training, batch: tuple[Tensor, Tensor], factor: float, set_to_none: bool) -> None:
    one.backward(batch, factor)
    one.scaler.unscale_(one.optimizer)
    one.optimizer.zero_grad(set_to_none)


@each_loop
@set_to_none
@pytest.mark.parametrize("factor", [1.0, INF, NAN], ids=str)
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_an_abandoned_iteration_leaves_no_trace(loop: str, set_to_none: bool, factor: float, unscale: bool) -> None:
    one, (lost, *batches) = Training(loop), make_batches(4)
    for number, batch in enumerate(batches):
        if number != 1:
            abandon(one, lost, factor, set_to_none)
        one.backward(batch)
        if unscale:
            one.scaler.unscale_(one.optimizer)
            assert all(gradient.isfinite().all() for gradient in gradients(one.net))
        one.finish()
        one.optimizer.zero_grad(set_to_none)
    assert_same(one.parameters(), plain_parameters(loop, [[batch] for batch in batches]))


@set_to_none
def test_several_abandoned_iterations_in_a_row(set_to_none: bool) -> None:
    one, (lost, batch) = Training(), make_batches(2)
    for factor in (INF, 1.0, NAN, INF):
        abandon(one, lost, factor, set_to_none)
    one.backward(batch)
    one.finish()
    assert_same(one.parameters(), plain_parameters("for-loop", [[batch]]))


@pytest.mark.parametrize("clear", ["model", "by hand", "data"])
def test_gradients_may_be_cleared_in_any_way(clear: str) -> None:
    ways: dict[str, Callable[[Training], None]] = {
        "model": lambda one: one.net.zero_grad(),
        "by hand": lambda one: [setattr(parameter, "grad", None) for parameter in one.net.parameters()] and None,
        "data": lambda one: [parameter.grad.data.zero_() for parameter in one.net.parameters()] and None,
    }
    one, (lost, batch) = Training(), make_batches(2)
    one.backward(lost, INF)
    one.scaler.unscale_(one.optimizer)
    ways[clear](one)
    one.backward(batch)
    one.finish()
    assert_same(one.parameters(), plain_parameters("for-loop", [[batch]]))


def test_an_abandoned_iteration_with_an_inf_that_stays_is_skipped() -> None:
    # Nobody cleared the gradients, so the Inf is still in them.
    one, (lost, batch) = Training(), make_batches(2)
    one.backward(lost, INF)
    one.scaler.unscale_(one.optimizer)
    one.backward(batch)
    one.finish()
    assert_same(one.parameters(), parameters_of(make_net()))
    assert one.scaler.get_scale() == 512.0
