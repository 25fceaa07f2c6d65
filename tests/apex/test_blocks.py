"""Blocks in blocks, steps in blocks, and optimizers that share parameters: gradients are never left scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mezzo.apex import amp
from mezzo.errors import AmpError

from .nets import (
    LEVELS,
    backward,
    close,
    gradients,
    loss_of,
    net,
    plant,
    reference_gradients,
    scale,
    sgd,
    start,
    state_of,
)


def two_optimizers(level: str, **options: Any) -> tuple[nn.Sequential, list[Any]]:
    """Of the first layer, and of the others."""
    model = net()
    optimizers = [sgd(model[0]), sgd(model[1:])]
    amp.initialize(model, optimizers, opt_level=level, verbosity=0, **options)
    return model, optimizers


# Blocks in blocks


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("outer_first", [True, False])
def test_a_block_inside_of_another(level: str, outer_first: bool) -> None:
    model, optimizer = start(level, loss_scale=1024.0)
    with amp.scale_loss(loss_of(model, 1), optimizer) as first:
        if outer_first:
            first.backward()
        with amp.scale_loss(loss_of(model, 2), optimizer) as second:
            second.backward()
        if not outer_first:
            first.backward()
    close(gradients(optimizer), reference_gradients(1, 2))
    assert not optimizer._amp_stash.params_have_scaled_gradients


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("inner", [16.0, 1.0], ids=str)
def test_two_losses_in_one_with_statement_whose_scales_have_drifted_apart(level: str, inner: float) -> None:
    model, optimizer = start(level, num_losses=2)
    amp._amp_state.loss_scalers[0]._loss_scale = 1024.0
    amp._amp_state.loss_scalers[1]._loss_scale = inner
    with (
        amp.scale_loss(loss_of(model, 1), optimizer) as first,
        amp.scale_loss(loss_of(model, 2), optimizer, loss_id=1) as second,
    ):
        first.backward()
        second.backward()
    close(gradients(optimizer), reference_gradients(1, 2))
    assert [scaler._unskipped for scaler in amp._amp_state.loss_scalers] == [1, 1]
    with (
        amp.scale_loss(loss_of(model, 1), optimizer) as first,
        amp.scale_loss(loss_of(model, 2), optimizer, loss_id=1) as second,
    ):
        (first + second).backward()
        plant(optimizer)
    assert (scale(0), scale(1)) == (512.0, inner / 2)
    before = state_of(model, optimizer)
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, state_of(model, optimizer), strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_an_inner_block_of_one_of_the_optimizers(level: str) -> None:
    model, optimizers = two_optimizers(level, loss_scale=1024.0)
    with amp.scale_loss(loss_of(model, 1), optimizers) as first:
        first.backward()
        with amp.scale_loss(loss_of(model, 2), optimizers[0]) as second:
            grads = torch.autograd.grad(second, list(model[0].parameters()))
            for one, gradient in zip(model[0].parameters(), grads, strict=True):
                assert one.grad is not None
                one.grad += gradient
    wanted = [*reference_gradients(1, 2)[:2], *reference_gradients(1)[2:]]
    close([each for optimizer in optimizers for each in gradients(optimizer)], wanted)


def test_blocks_of_different_optimizers_keep_their_scales() -> None:
    models = [net(), net()]
    optimizers = [sgd(model) for model in models]
    amp.initialize(models, optimizers, opt_level="O2", num_losses=2, verbosity=0)
    amp._amp_state.loss_scalers[1]._loss_scale = 16.0
    with amp.scale_loss(loss_of(models[0], 1), optimizers[0]) as first:
        with amp.scale_loss(loss_of(models[1], 2), optimizers[1], loss_id=1) as second:
            second.backward()
        first.backward()
    close(gradients(optimizers[0]), reference_gradients(1))
    close(gradients(optimizers[1]), reference_gradients(2))


def test_a_block_inside_of_two_of_different_scales_is_refused() -> None:
    model, optimizers = two_optimizers("O2", num_losses=2)
    amp._amp_state.loss_scalers[1]._loss_scale = 16.0
    text = r"inside of blocks of its optimizers that have different scales, 65536 and 16"
    with (
        amp.scale_loss(loss_of(model, 1), optimizers[0]) as first,
        amp.scale_loss(loss_of(model, 1), optimizers[1], loss_id=1),
    ):
        with pytest.raises(AmpError, match=text), amp.scale_loss(loss_of(model, 2), optimizers):
            pass
        first.backward(inputs=list(model[0].parameters()))
    close(gradients(optimizers[0]), reference_gradients(1)[:2])


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_in_an_inner_block_ends_both(level: str) -> None:
    model, optimizer = start(level)
    backward(model, optimizer, 1)
    before = gradients(optimizer)
    with (
        pytest.raises(KeyError),
        amp.scale_loss(loss_of(model, 2), optimizer),
        amp.scale_loss(loss_of(model, 3), optimizer),
    ):
        raise KeyError
    assert all(torch.equal(one, other) for one, other in zip(before, gradients(optimizer), strict=True))
    optimizer.zero_grad()
    backward(model, optimizer, 4)
    close(gradients(optimizer), reference_gradients(4))


# Steps in blocks


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_in_a_block_is_that_after_it(level: str) -> None:
    finished = []
    for inside in (False, True):
        model, optimizer = start(level, loss_scale="dynamic", max_loss_scale=1024.0)
        for seed in (1, 2):
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, seed), optimizer) as scaled:
                scaled.backward()
                if inside:
                    optimizer.step()
            if not inside:
                optimizer.step()
        assert amp._amp_state.loss_scalers[0]._unskipped == 2
        finished.append(state_of(model, optimizer))
    for one, other in zip(*finished, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("which", [0, 1])
def test_one_of_two_optimizers_steps_in_the_block(level: str, which: int) -> None:
    model, optimizers = two_optimizers(level, loss_scale=1024.0)
    with amp.scale_loss(loss_of(model, 1), optimizers) as scaled:
        scaled.backward()
        optimizers[which].step()
    close([each for optimizer in optimizers for each in gradients(optimizer)], reference_gradients(1))
    optimizers[1 - which].step()
    wanted = net()
    reference = sgd(wanted)
    loss_of(wanted, 1).backward()
    reference.step()
    for one, other in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.0, atol=5e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_in_a_block_that_overflows_is_skipped(level: str) -> None:
    model, optimizer = start(level)
    before = state_of(model, optimizer)
    with amp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        scaled.backward()
        plant(optimizer)
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, state_of(model, optimizer), strict=True))
    assert scale() == 32768.0
    optimizer.zero_grad()
    backward(model, optimizer, 2)
    optimizer.step()
    assert scale() == 32768.0
    assert not torch.equal(before[0], state_of(model, optimizer)[0])


def test_steps_in_the_backward_pass() -> None:
    """An optimizer for each parameter, stepped by its gradient's hook: there is never a whole set of gradients."""
    model = net()
    optimizers = {id(one): torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
    amp.initialize(model, list(optimizers.values()), opt_level="O1", loss_scale=1024.0, verbosity=0)

    def step(one: torch.Tensor) -> None:
        optimizers[id(one)].step()
        one.grad = None

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(step)
    with amp.scale_loss(loss_of(model, 1), list(optimizers.values())) as scaled:
        scaled.backward()
    wanted = net()
    loss_of(wanted, 1).backward()
    torch.optim.SGD(wanted.parameters(), lr=0.1).step()
    for one, other in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=5e-3)


# Parameters of two optimizers


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("second", ["a", "b", "ab", "ba"])
@pytest.mark.parametrize("first", ["a", "ab"])
def test_shared_parameters_after_a_delayed_block(level: str, first: str, second: str) -> None:
    model = net()
    optimizers = {"a": sgd(model), "b": sgd(model[0])}
    amp.initialize(model, list(optimizers.values()), opt_level=level, loss_scale=1024.0, verbosity=0)
    for seed, names, delay in ((1, first, True), (2, second, False)):
        with amp.scale_loss(loss_of(model, seed), [optimizers[name] for name in names], delay_unscale=delay) as scaled:
            scaled.backward()
    close(gradients(optimizers["a"]), reference_gradients(1, 2))
    assert not any(each._amp_stash.params_have_scaled_gradients for each in optimizers.values())


def test_shared_parameters_are_unscaled_once_by_late_steps() -> None:
    model = net()
    optimizers = [sgd(model), sgd(model[0])]
    amp.initialize(model, optimizers, opt_level="O1", loss_scale=1024.0, verbosity=0)
    with amp.scale_loss(loss_of(model, 1), optimizers, delay_unscale=True) as scaled:
        scaled.backward()
    with pytest.warns(RuntimeWarning, match="Leave delay_unscale"):
        optimizers[0].step()
    close(gradients(optimizers[0]), reference_gradients(1))
    optimizers[1].step()
    close(gradients(optimizers[1]), reference_gradients(1)[:2])


def test_delayed_gradients_that_were_zeroed_are_forgotten() -> None:
    model, optimizer = start("O2", loss_scale=1024.0)
    backward(model, optimizer, 1, delay_unscale=True)
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer._amp_stash.params_have_scaled_gradients


# A pending skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["clip", "nan_to_num"])
def test_gradients_that_were_only_made_finite_are_not_stepped_with(level: str, how: str) -> None:
    model, optimizer = start(level)
    before = state_of(model, optimizer)
    backward(model, optimizer, 1, overflow=True)
    if how == "clip":
        nn.utils.clip_grad_value_(amp.master_params(optimizer), 1.0)
    else:
        for one in amp.master_params(optimizer):
            assert one.grad is not None
            one.grad.nan_to_num_()
    assert all(one.isfinite().all() for one in gradients(optimizer))
    backward(model, optimizer, 2)
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, state_of(model, optimizer), strict=True))


def test_a_block_is_told_once_however_many_optimizers_step_in_it() -> None:
    model = net()
    optimizers = [torch.optim.SGD([one], lr=0.01) for one in model.parameters()]
    amp.initialize(model, optimizers, opt_level="O1", max_loss_scale=128.0, verbosity=0)
    scaler = amp._amp_state.loss_scalers[0]
    for overflow, wanted in ((False, (128.0, 1)), (True, (64.0, 0)), (False, (64.0, 1))):
        with amp.scale_loss(loss_of(model), optimizers) as scaled:
            scaled.backward()
            for one, optimizer in zip(model.parameters(), optimizers, strict=True):
                assert one.grad is not None
                if overflow:
                    one.grad.fill_(torch.inf)
                optimizer.step()
                optimizer.zero_grad()
        assert (scaler.loss_scale(), scaler._unskipped) == wanted
