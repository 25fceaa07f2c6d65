"""Blocks of `scale_loss`: the scaled loss, gradients at the end of a block, accumulation, several losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.apex import amp
from mezzo.errors import AmpError, AmpTypeError

from .nets import (
    LEVELS,
    TOLERANCE,
    backward,
    batch,
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


@pytest.mark.parametrize("level", LEVELS)
def test_the_scaled_loss_is_float32_times_the_scale(level: str) -> None:
    model, optimizer = start(level)
    loss = loss_of(model).half()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype is torch.float32
        assert scaled.item() == loss.item() * 65536.0


@pytest.mark.parametrize("level", LEVELS)
def test_after_a_block_gradients_are_unscaled(level: str) -> None:
    model, optimizer = start(level)
    backward(model, optimizer)
    close(gradients(optimizer), reference_gradients(1))
    assert scale() == 65536.0


def test_in_a_block_gradients_are_scaled_and_may_be_changed() -> None:
    model, optimizer = start("O2")
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        with torch.no_grad():
            for one in model.parameters():
                assert one.grad is not None
                one.grad.mul_(0.5)
    close(gradients(optimizer), [each / 2 for each in reference_gradients(1)])


@pytest.mark.parametrize("level", LEVELS)
def test_blocks_add_up(level: str) -> None:
    model, optimizer = start(level, loss_scale=4096.0)
    for seed in (1, 2, 3):
        backward(model, optimizer, seed)
    close(gradients(optimizer), reference_gradients(1, 2, 3))


@pytest.mark.parametrize("level", LEVELS)
def test_losses_with_scales_of_their_own_add_up(level: str) -> None:
    model, optimizer = start(level, num_losses=2)
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    amp._amp_state.loss_scalers[1]._loss_scale = 1024.0
    backward(model, optimizer, 1, loss_id=0)
    backward(model, optimizer, 2, loss_id=1)
    close(gradients(optimizer), reference_gradients(1, 2))
    assert (scale(0), scale(1)) == (4.0, 1024.0)


def test_gradients_from_before_initialize_are_kept() -> None:
    for level in LEVELS:
        model = net()
        loss_of(model, 1).backward()
        optimizer = sgd(model)
        amp.initialize(model, optimizer, opt_level=level, loss_scale=256.0, verbosity=0)
        backward(model, optimizer, 2)
        close(gradients(optimizer), reference_gradients(1, 2))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zeroed", [False, True], ids=["fresh", "after zero_grad"])
def test_delayed_blocks_are_unscaled_by_the_last_one(level: str, zeroed: bool) -> None:
    model, optimizer = start(level, loss_scale=512.0)
    if zeroed:
        optimizer.zero_grad()
    backward(model, optimizer, 1, delay_unscale=True)
    assert optimizer._amp_stash.params_have_scaled_gradients
    backward(model, optimizer, 2, delay_unscale=True)
    close([each / 512 for each in gradients(optimizer)], reference_gradients(1, 2))
    backward(model, optimizer, 3)
    assert not optimizer._amp_stash.params_have_scaled_gradients
    close(gradients(optimizer), reference_gradients(1, 2, 3))


def test_a_delayed_block_may_follow_unscaled_gradients_and_other_scales() -> None:
    model, optimizer = start("O2", num_losses=2)
    amp._amp_state.loss_scalers[1]._loss_scale = 64.0
    backward(model, optimizer, 1)
    backward(model, optimizer, 2, delay_unscale=True)
    backward(model, optimizer, 3, loss_id=1, delay_unscale=True)
    backward(model, optimizer, 4)
    close(gradients(optimizer), reference_gradients(1, 2, 3, 4))


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_after_a_delayed_block_unscales_and_warns_once(level: str) -> None:
    finished = []
    for delay in (False, True):
        model, optimizer = start(level, loss_scale=256.0)
        backward(model, optimizer, delay_unscale=delay)
        if delay:
            with pytest.warns(RuntimeWarning, match="Leave delay_unscale and no_sync out in the last block"):
                optimizer.step()
            optimizer.zero_grad()
            backward(model, optimizer, delay_unscale=True)
            optimizer.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
            backward(model, optimizer)
            optimizer.step()
        finished.append(state_of(model, optimizer))
    for one, other in zip(*finished, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("wrapped", [list, tuple], ids=["list", "tuple"])
def test_several_optimizers_take_part(wrapped: type) -> None:
    model = net()
    optimizers = [sgd(model[0]), sgd(model[1:])]
    amp.initialize(model, optimizers, opt_level="O2", verbosity=0)
    for _ in range(2):
        with amp.scale_loss(loss_of(model), wrapped(optimizers)) as scaled:
            scaled.backward()
    found = [each for optimizer in optimizers for each in gradients(optimizer)]
    close(found, [2 * each for each in reference_gradients(1)])


def test_a_parameter_of_two_optimizers_is_unscaled_once() -> None:
    model = net()
    optimizers = [sgd(model), torch.optim.SGD(model[0].parameters(), lr=0.1)]
    amp.initialize(model, optimizers, opt_level="O1", verbosity=0)
    for _ in range(2):
        with amp.scale_loss(loss_of(model), optimizers) as scaled:
            scaled.backward()
    close(gradients(optimizers[0]), [2 * each for each in reference_gradients(1)])


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_in_a_block_leaves_gradients_as_they_were(level: str) -> None:
    model, optimizer = start(level)
    backward(model, optimizer, 1)
    before = gradients(optimizer)
    with pytest.raises(KeyError), amp.scale_loss(loss_of(model, 2), optimizer):
        raise KeyError
    assert all(torch.equal(one, other) for one, other in zip(gradients(optimizer), before, strict=True))
    assert scale() == 65536.0
    optimizer.zero_grad()
    with pytest.raises(KeyError), amp.scale_loss(loss_of(model, 2), optimizer) as scaled:
        scaled.backward()
        raise KeyError
    assert gradients(optimizer) == []
    backward(model, optimizer, 3)
    close(gradients(optimizer), reference_gradients(3))


def test_delay_overflow_check_leaves_the_decision_to_the_script() -> None:
    model, optimizer = start("O2")
    scaler = amp._amp_state.loss_scalers[0]
    backward(model, optimizer, overflow=True, delay_overflow_check=True)
    assert scale() == 65536.0
    assert not optimizer._amp_stash.already_patched
    assert scaler._overflow_buf.item() != 0
    assert scaler.update_scale()
    assert scale() == 32768.0
    # As NVIDIA's BERT does it: the script has looked by itself.
    for one in optimizer._amp_stash.all_fp32_from_fp16_params:
        one.grad = None
    assert all(one.grad is None for one in optimizer._amp_stash.all_fp16_params)
    scaler.clear_overflow_state()
    scaler._overflow_buf = torch.zeros(1, dtype=torch.int32)
    assert not scaler.update_scale()
    assert scaler._unskipped == 1


def test_with_the_static_scale_one_nothing_is_looked_at() -> None:
    model, optimizer = start("O0", loss_scale=None)
    before = [one.detach().clone() for one in model.parameters()]
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        plant(optimizer, torch.nan)
    optimizer.step()
    assert not torch.equal(before[2], model[1].weight)
    assert model[0].weight.isnan().sum() == 1


@pytest.mark.parametrize("loss_scale", [1.0, "1.0", 2.0])
def test_small_static_scales_lose_no_accumulated_gradient(loss_scale: float | str) -> None:
    """With 1.0 Apex's O2 threw those of batch norms away in each block."""
    model, optimizer = start("O2", loss_scale=loss_scale)
    for _ in range(2):
        backward(model, optimizer, 1)
    close(gradients(optimizer), [2 * each for each in reference_gradients(1)])


def test_disabled_amp_gives_the_loss_itself() -> None:
    model = net()
    optimizer = sgd(model)
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
    with amp.disable_casts():
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32


def test_a_sparse_gradient_is_unscaled_and_added_to() -> None:
    found = []
    for level in ("O0", "O1"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"loss_scale": None} if level == "O0" else {"loss_scale": 128.0}
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        for _ in range(2):
            with amp.scale_loss(model(torch.tensor([1, 1, 3])).square().mean(), optimizer) as scaled:
                scaled.backward()
        gradient = model[0].weight.grad
        assert gradient is not None
        found.append(gradient.coalesce().to_dense())
    torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=TOLERANCE * float(found[0].abs().max()))


# Errors


def test_before_initialize_it_says_what_to_call() -> None:
    model = net()
    with (
        pytest.raises(AmpError, match=r"amp.scale_loss was called before amp.initialize. Call model, optimizer ="),
        amp.scale_loss(loss_of(model), sgd(model)),
    ):
        pass


def test_an_optimizer_that_initialize_has_not_seen_is_named() -> None:
    model, optimizer = start("O1")
    other = sgd(net())
    for wrong in (other, [optimizer, other]):
        with (
            pytest.raises(AmpError, match=r"This SGD was not given to amp\.initialize"),
            amp.scale_loss(loss_of(model), wrong),
        ):
            pass
    with (
        pytest.raises(AmpTypeError, match="takes an optimizer, or a list of optimizers, got Sequential"),
        amp.scale_loss(loss_of(model), model),
    ):
        pass
    backward(model, optimizer)
    close(gradients(optimizer), reference_gradients(1))


def test_a_loss_that_is_no_tensor_is_told() -> None:
    model, optimizer = start("O1")
    loss = loss_of(model)
    for wrong, kind in (([loss, loss], "list"), (loss.item(), "float")):
        with (
            pytest.raises(AmpTypeError, match=f"takes the loss as a tensor, got {kind}"),
            amp.scale_loss(wrong, optimizer),  # type: ignore[arg-type]
        ):
            pass


@pytest.mark.parametrize("wrong", [2, -1])
def test_a_loss_id_without_a_scaler_is_an_index_error(wrong: int) -> None:
    model, optimizer = start("O1", num_losses=2)
    with (
        pytest.raises(IndexError, match=rf"loss_id={wrong}, and amp.initialize made 2 loss scaler"),
        amp.scale_loss(loss_of(model), optimizer, loss_id=wrong),
    ):
        pass


def test_a_loss_id_that_is_no_number_is_told() -> None:
    model, optimizer = start("O1", num_losses=2)
    for wrong in ("0", None, True, 1.0):
        with pytest.raises(AmpTypeError, match="an int from 0; got"), amp.scale_loss(loss_of(model), optimizer, wrong):  # type: ignore[arg-type]
            pass


def test_the_model_may_be_named_and_inputs_stay() -> None:
    model, optimizer = start("O2")
    inputs, _ = batch()
    before = inputs.clone()
    with amp.scale_loss(model(inputs).sum(), optimizer, 0, model) as scaled:
        scaled.backward()
    assert torch.equal(inputs, before)
