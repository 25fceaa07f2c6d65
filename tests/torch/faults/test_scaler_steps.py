"""Section F, second part: what `step` does, and what one can know about it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from .amps import Amp
from .seen_ops import host_reads
from .training import INF, NAN, backward, iterate, parameters_of, plain, weight

# F3, top 15 no. 1: a skipped step cannot be seen


@pytest.mark.parametrize("fused", [False, True])
def test_f3_whether_it_stepped_can_be_asked(amp: Amp, fused: bool) -> None:
    """F3: right after `step`, after `update` too, and whatever becomes of the scale."""
    scaler, optimizer = amp.scaler(), plain([weight(1.0)], fused=fused)
    for slope, stepped in [(INF, False), (1.0, True), (NAN, False), (1.0, True)]:
        optimizer.zero_grad()
        backward(scaler, parameters_of(optimizer), slope)
        scaler.step(optimizer)
        assert scaler.stepped(optimizer) is stepped
        assert scaler.found_inf(optimizer).item() == (not stepped)
        scaler.update(1024.0)
        assert scaler.stepped(optimizer) is stepped
    assert scaler.steps_taken(optimizer) == 2


def test_f3_each_of_two_optimizers_has_its_own_answer(amp: Amp) -> None:
    """F3: the scale is one for both: comparing scales cannot tell which one was skipped."""
    scaler, optimizers = amp.scaler(), [plain([weight(1.0)]), plain([weight(1.0)])]
    for slopes in [(1.0, INF), (INF, INF), (INF, 1.0)]:
        for optimizer, slope in zip(optimizers, slopes, strict=True):
            optimizer.zero_grad()
            backward(scaler, parameters_of(optimizer), slope)
            scaler.step(optimizer)
        scaler.update()
        assert [scaler.stepped(optimizer) for optimizer in optimizers] == [slope == 1.0 for slope in slopes]
    assert [scaler.skipped_in_a_row(optimizer) for optimizer in optimizers] == [2, 0]


def test_f3_an_idle_optimizer_has_not_stepped(amp: Amp) -> None:
    """F3: without gradients this time, whatever became of its step before; no overflow either."""
    scaler, w, other = amp.scaler(), weight(1.0), weight(1.0)
    optimizer, stepped = plain([w]), []
    for parameter in (w, other, w):
        optimizer.zero_grad()
        backward(scaler, [parameter], 1.0)
        scaler.step(optimizer)
        stepped.append(scaler.stepped(optimizer))
        scaler.update()
    assert stepped == [True, False, True]
    assert scaler.skipped_in_a_row(optimizer) == 0


def test_f3_a_callback_hears_of_each_skip(amp: Amp) -> None:
    """F3: and of no step that was made."""
    heard: list[tuple[float, int]] = []
    scaler = amp.scaler(on_overflow=lambda overflow: heard.append((overflow.scale, overflow.skipped_in_a_row)))
    optimizer = plain([weight(1.0)])
    for slope in (1.0, INF, INF, 1.0, INF):
        iterate(scaler, optimizer, slope)
    assert heard == [(2.0**16, 1), (2.0**15, 2), (2.0**14, 1)]


def test_f3_a_schedule_advances_with_the_optimizer(amp: Amp) -> None:
    """F3: five iterations, three steps: the learning rate of the third step."""
    scaler, optimizer = amp.scaler(), plain([weight(1.0)])
    schedule = amp.stepping(StepLR(optimizer, step_size=1, gamma=0.5), scaler)
    rates = []
    for slope in (1.0, INF, 1.0, NAN, 1.0):
        iterate(scaler, optimizer, slope)
        schedule.step()
        rates += schedule.get_last_lr()
    assert rates == [0.5, 0.5, 0.25, 0.25, 0.125]


def test_f3_no_warning_about_the_order_of_schedule_and_step(amp: Amp) -> None:
    """F3: the first step of a run is often skipped, and PyTorch then blames the script."""
    scaler, optimizer = amp.scaler(), plain([weight(1.0)])
    schedule = amp.stepping(StepLR(optimizer, step_size=1, gamma=0.5), scaler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for slope in (INF, 1.0):
            iterate(scaler, optimizer, slope)
            schedule.step()
    assert [str(warning.message) for warning in caught] == []
    assert schedule.get_last_lr() == [0.5]


# F4, top 15 no. 14: a host read at each step, and nothing to compile


def test_f4_the_step_of_an_optimizer_that_reads_nothing_is_known_without_reading(amp: Amp) -> None:
    """F4: the verdict of a fused step is a tensor on the device."""
    scaler, optimizer = amp.scaler(), plain([weight(1.0)], fused=True)
    with host_reads() as reads:
        iterate(scaler, optimizer, 1.0)
        verdict = scaler.found_inf(optimizer)
    assert reads == []
    assert (verdict.dtype, verdict.shape, verdict.item()) == (torch.float32, (), 0.0)


def masked_training(amp: Amp, optimizer_step: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Make a whole step, of any update rule, out of the functional core: tensors in, tensors out."""
    from mezzo.scaling import LossScaling

    numbers = LossScaling(growth_interval=2)
    unscale, select, next_scale = amp.unscale_gradients, amp.select_finite, amp.next_scale

    def step(w: Tensor, slope: Tensor, scale: Tensor, tracker: Tensor) -> tuple[Tensor, ...]:
        (grad,), found_inf = unscale([slope * scale], scale)
        new = select(found_inf, optimizer_step(w, grad), w)
        return new, *next_scale(scale, tracker, found_inf, numbers)

    return step


@pytest.mark.parametrize("compiled", [False, True])
def test_f4_any_update_rule_can_be_masked_without_reading(amp: Amp, compiled: bool) -> None:
    """F4: a step without a host read, which compiles with no graph break."""
    step = masked_training(amp, lambda w, grad: w - 0.5 * grad.sign())
    if compiled:
        step = torch.compile(step, backend="eager", fullgraph=True)
    state = (torch.tensor(1.0), torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32))
    # Code that compiles into one graph reads nothing; under a dispatch mode it does not compile.
    with nullcontext([]) if compiled else host_reads() as reads:
        for slope in (torch.tensor(2.0), torch.tensor(INF), torch.tensor(2.0), torch.tensor(2.0)):
            state = step(state[0], slope, *state[1:])
    assert reads == []
    assert [value.item() for value in state] == [-0.5, 2.0**16, 0]


# F7: clipping gradients that are still scaled


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_f7_clipping_knows_that_gradients_are_scaled(amp: Amp, max_norm: float) -> None:
    """F7: the true norm is clipped and returned; PyTorch's clipping shrinks the step by the scale."""
    scaler, w = amp.scaler(), weight(0.0, 0.0)
    optimizer, slope = plain([w]), torch.tensor([3.0, -4.0])
    backward(scaler, [w], slope)
    norm = amp.clip(scaler, [w], max_norm)
    scaler.step(optimizer)
    assert norm.item() == pytest.approx(5.0, rel=1e-6)
    # PyTorch's clipping divides by the norm plus 1e-6.
    torch.testing.assert_close(w.detach(), -slope * min(1.0, max_norm / 5), rtol=1e-6, atol=0)


def test_f7_clipping_leaves_an_overflow_to_the_verdict(amp: Amp) -> None:
    """F7: an infinite norm neither raises nor spreads: the step is skipped and the parameter named."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    scaler, optimizer = amp.scaler(), plain(net.parameters())
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    assert net[1].bias.grad is not None
    net[1].bias.grad.fill_(INF)
    assert amp.clip(scaler, net.parameters(), 1.0).item() == INF
    scaler.step(optimizer)
    assert [found.name for found in scaler.nonfinite(optimizer)] == ["1.bias"]


# F15: a scaler as a fixed multiplier


def test_f15_a_scale_that_stays(amp: Amp) -> None:
    """F15: floor and ceiling at one number: overflows are skipped and nothing else happens."""
    fixed = 2.0**10
    scaler, w = amp.scaler(fixed, growth_interval=1, min_scale=fixed, max_scale=fixed), weight(0.0)
    for slope in (1.0, 1.0, INF, NAN, 1.0):
        iterate(scaler, plain([w]), slope)
        assert scaler.get_scale() == fixed
    assert w.item() == -3.0
