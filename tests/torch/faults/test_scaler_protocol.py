"""Section F, first part: orders of calls that PyTorch refuses, or takes and then steps with wrong gradients.

F3, F4, F7 and F15 are in ``test_scaler_steps.py``, F5 and F6 in ``test_scaler_optimizers.py``. What PyTorch 2.13 gets
right (F4's host reads, F11, F12) is in ``test_scaler_faults_fixed.py``, outside of this folder.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from .amps import Amp
from .training import INF, backward, iterate, plain, weight

# F1, top 15 no. 6: "No inf checks were recorded for this optimizer."

# What keeps gradients from an optimizer: (net, what the optimizer is made over, what makes a loss without it).
Case = tuple[list[Tensor], Callable[[], Tensor]]


def made_before_the_model_was_replaced() -> Case:
    net = nn.Linear(2, 2)
    old, net = net, copy.deepcopy(net)
    return list(old.parameters()), lambda: net(torch.ones(1, 2)).sum()


def detached() -> Case:
    net, head = nn.Linear(2, 2), nn.Linear(2, 2)
    return list(net.parameters()), lambda: head(net(torch.ones(1, 2)).detach()).sum()


def frozen() -> Case:
    net, head = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    return list(net.parameters()), lambda: head(net(torch.ones(1, 2))).sum()


def unused() -> Case:
    nets = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    return list(nets[0].parameters()), lambda: nets[1](torch.ones(1, 2)).sum()


CAUSES = [made_before_the_model_was_replaced, detached, frozen, unused]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cause", CAUSES)
def test_f1_an_optimizer_without_gradients_is_left_alone(amp: Amp, cause: Callable[[], Case], fused: bool) -> None:
    """F1: `step` does nothing, `update` has nothing to go by, and both say nothing."""
    parameters, loss = cause()
    scaler, optimizer = amp.scaler(growth_interval=1), plain(parameters, weight_decay=0.5, fused=fused)
    before = [p.detach().clone() for p in parameters]
    for _ in range(2):
        scaler.scale(loss()).backward()
        assert scaler.step(optimizer) is None
        scaler.update()
    assert all(p.equal(b) for p, b in zip(parameters, before, strict=True))
    assert scaler.get_scale() == 2.0**16
    assert scaler.steps_taken(optimizer) == 0


def test_f1_one_of_two_optimizers_is_idle(amp: Amp) -> None:
    """F1: as in a GAN, whose generator waits while the discriminator trains: the other one's verdict counts."""
    active, idle = weight(1.0), weight(1.0)
    scaler = amp.scaler(growth_interval=1)
    optimizers = [plain([active]), plain([idle])]
    for slope in (1.0, INF, 1.0):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(scaler, [active], slope)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert (active.item(), idle.item()) == (-1.0, 1.0)
    assert scaler.get_scale() == 2.0**17


def test_f1_an_optimizer_trains_again_after_idle_iterations(amp: Amp) -> None:
    """F1: idle or not is a matter of the iteration."""
    w, other = weight(1.0), weight(1.0)
    scaler, optimizer = amp.scaler(), plain([w])
    for parameter in (other, w, other, w):
        optimizer.zero_grad()
        backward(scaler, [parameter], 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert w.item() == -1.0


@pytest.mark.parametrize("cause", CAUSES)
def test_f1_strict_says_how_many_parameters_and_why(amp: Amp, cause: Callable[[], Case]) -> None:
    """F1: who wants an error for it gets one that helps, and is an AssertionError as PyTorch's."""
    parameters, loss = cause()
    scaler, optimizer = amp.scaler(strict=True), plain(parameters)
    scaler.scale(loss()).backward()
    with pytest.raises(AssertionError) as caught:
        scaler.step(optimizer)
    said = str(caught.value)
    assert said.startswith("No inf checks were recorded for this optimizer.")
    assert "2 parameter" in said
    assert ("requires_grad" in said) == (cause is frozen)


# F2: "unscale_() has already been called on this optimizer since the last update()."


def clipping_loop(amp: Amp, abandon: Callable[[float], bool], *, set_to_none: bool, fused: bool) -> float:
    """Train one weight on slopes 1, 2, 4, INF, 8, leaving iterations after `unscale_` where a test says so."""
    scaler, w = amp.scaler(), weight(0.0)
    optimizer = plain([w], fused=fused)
    for slope in (1.0, 2.0, 4.0, INF, 8.0):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(scaler, [w], slope)
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_([w], 100.0)
        assert norm.item() == slope
        if abandon(slope):
            continue
        scaler.step(optimizer)
        scaler.update()
    return w.item()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("abandoned", [(2.0,), (2.0, 4.0), (INF,), (4.0, INF)])
def test_f2_an_iteration_abandoned_after_unscale(
    amp: Amp, abandoned: tuple[float, ...], set_to_none: bool, fused: bool
) -> None:
    """F2: a script that skips `step` and `update`, for the norm is too large or the loss is None, goes on."""
    result = clipping_loop(amp, lambda slope: slope in abandoned, set_to_none=set_to_none, fused=fused)
    assert result == -sum(slope for slope in (1.0, 2.0, 4.0, 8.0) if slope not in abandoned)


def test_f2_unscaling_twice_unscales_once(amp: Amp) -> None:
    """F2: a trainer unscales to clip, and a callback of the user's does so to log the norm."""
    scaler, w = amp.scaler(), weight(0.0)
    optimizer = plain([w])
    backward(scaler, [w], 3.0)
    for _ in range(3):
        scaler.unscale_(optimizer)
        assert w.grad is not None
        assert w.grad.item() == 3.0
    scaler.step(optimizer)
    assert w.item() == -3.0


def test_f2_unscale_in_each_accumulation_step(amp: Amp) -> None:
    """F2: what a later backward adds is unscaled as it is added."""
    scaler, w = amp.scaler(), weight(0.0)
    optimizer = plain([w])
    for slope in (1.0, 2.0, 4.0):
        backward(scaler, [w], slope)
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert w.item() == -7.0
    iterate(scaler, optimizer, 8.0)
    assert w.item() == -15.0


def test_f2_an_overflow_after_unscale_is_seen(amp: Amp) -> None:
    """F2: the second backward of the iteration overflows: no step."""
    scaler, w = amp.scaler(), weight(0.0)
    optimizer = plain([w])
    for slope in (1.0, INF):
        backward(scaler, [w], slope)
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert w.item() == 0.0
    assert scaler.get_scale() == 2.0**15


def test_f2_a_parameter_of_two_optimizers_is_unscaled_once(amp: Amp) -> None:
    """Top 15 no. 15: the second optimizer took a gradient 65536 times too small."""
    scaler, shared = amp.scaler(), weight(0.0)
    first, second = plain([shared]), plain([shared])
    backward(scaler, [shared], 1.0)
    scaler.step(first)
    assert shared.item() == -1.0
    scaler.step(second)
    assert shared.item() == -2.0


# F9: clipping in iterations that only accumulate


def reference_of_clipping(slopes: list[Tensor], max_norm: float) -> Tensor:
    total = torch.zeros_like(slopes[0])
    for slope in slopes:
        total = total + slope
        total = total * min(1.0, max_norm / total.norm().item())
    return -total


@pytest.mark.parametrize("unscaled_by_hand", [True, False])
def test_f9_clipping_in_each_accumulation_step(amp: Amp, unscaled_by_hand: bool) -> None:
    """F9: a trainer's clipping unscales each time it is called, though a step follows only in the end."""
    scaler, w = amp.scaler(), weight(0.0, 0.0)
    optimizer, slopes = plain([w]), [torch.tensor([3.0, 4.0]), torch.tensor([-1.0, 2.0]), torch.tensor([0.5, 0.0])]
    for slope in slopes:
        backward(scaler, [w], slope)
        if unscaled_by_hand:
            scaler.unscale_(optimizer)
        amp.clip(scaler, [w], 2.0)
    scaler.step(optimizer)
    # PyTorch's clipping divides by the norm plus 1e-6.
    torch.testing.assert_close(w.detach(), reference_of_clipping(slopes, 2.0), rtol=2e-6, atol=0)


# F10: the scale moves inside an accumulation window


def test_f10_the_scale_stays_while_gradients_are_accumulated(amp: Amp) -> None:
    """F10: one optimizer steps each time, another adds up four gradients; one scaler, updated each time."""
    scaler, often, seldom = amp.scaler(growth_interval=1), weight(0.0), weight(0.0)
    each, fourth = plain([often]), plain([seldom])
    with amp.accumulating(scaler):
        for _ in range(4):
            each.zero_grad()
            backward(scaler, [often, seldom], 1.0)
            scaler.step(each)
            scaler.update()
    scaler.step(fourth)
    scaler.update()
    assert (often.item(), seldom.item()) == (-4.0, -4.0)
    assert scaler.get_scale() == 2.0**17


def test_f10_overflows_within_the_window_count_after_it(amp: Amp) -> None:
    """F10: the scale backs off at the first update after the window, once."""
    scaler, often, seldom = amp.scaler(), weight(0.0), weight(0.0)
    each, second = plain([often]), plain([seldom])
    with amp.accumulating(scaler):
        for slope in (INF, 1.0, INF):
            each.zero_grad()
            backward(scaler, [often], slope)
            backward(scaler, [seldom], 1.0)
            scaler.step(each)
            scaler.update()
            assert scaler.get_scale() == 2.0**16
    scaler.step(second)
    scaler.update()
    assert (often.item(), seldom.item()) == (-1.0, -3.0)
    assert scaler.get_scale() == 2.0**15
