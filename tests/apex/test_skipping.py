"""Steps that are skipped: which, what they leave as it was, and what the scale does."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.apex import amp

from .nets import LEVELS, backward, batch, gradients, loss_of, net, plant, scale, sgd, start, state_of


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def train(model: nn.Module, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, optimizer, seed)
        optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=["inf", "nan"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_skipped_step_changes_nothing_but_the_scale(level: str, value: float, kind: type) -> None:
    model, optimizer = start(level, optimizer=lambda model: kind(model.parameters(), lr=0.01, weight_decay=0.1))
    train(model, optimizer, 1, 2)
    before = state_of(model, optimizer)
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, 3), optimizer) as scaled:
        scaled.backward()
        plant(optimizer, value)
    assert optimizer.step() is None
    assert same(state_of(model, optimizer), before)
    assert scale() == 32768.0
    train(model, optimizer, 4)
    assert not same(state_of(model, optimizer), before)
    assert scale() == 32768.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_exactly_the_steps_whose_gradients_overflow_are_skipped(level: str) -> None:
    """Without anything planted: the scale is so large that float16 overflows until it has fallen far enough."""
    model, optimizer = start(level)
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**24
    skipped = 0
    for seed in range(20):
        before = state_of(model, optimizer)
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, seed), optimizer) as scaled:
            scaled.backward()
            finite = all(one.isfinite().all() for one in gradients(optimizer))
        was = scale()
        optimizer.step()
        assert same(state_of(model, optimizer), before) is not finite
        assert scale() == was
        skipped += not finite
    assert 3 <= skipped <= 15
    assert scale() == 2.0 ** (24 - skipped)


def test_a_skip_is_told_in_apexs_words(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = start("O2", num_losses=2, verbosity=1)
    capsys.readouterr()
    backward(model, optimizer, overflow=True, loss_id=1)
    assert capsys.readouterr().out == ""
    optimizer.step()
    text = "Gradient overflow.  Skipping step, loss scaler 1 reducing loss scale to 32768.0\n"
    assert capsys.readouterr().out == text
    train(model, optimizer, 2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_with_a_static_scale_steps_are_skipped_too_and_the_scale_stays(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = start(level, loss_scale="128.0", verbosity=1)
    train(model, optimizer, 1)
    capsys.readouterr()
    before = state_of(model, optimizer)
    backward(model, optimizer, overflow=True)
    optimizer.step()
    assert same(state_of(model, optimizer), before)
    assert scale() == 128.0
    assert "loss scaler 0 static loss scale 128.0" in capsys.readouterr().out


@pytest.mark.parametrize("level", LEVELS)
def test_one_losss_overflow_does_not_touch_anothers_scale(level: str) -> None:
    model, optimizer = start(level, num_losses=3)
    before = state_of(model, optimizer)
    backward(model, optimizer, 1, loss_id=0)
    backward(model, optimizer, 2, loss_id=1, overflow=True)
    backward(model, optimizer, 3, loss_id=2)
    assert [scale(index) for index in range(3)] == [65536.0, 32768.0, 65536.0]
    optimizer.step()
    assert same(state_of(model, optimizer), before)


def test_only_the_optimizers_of_the_block_are_skipped() -> None:
    models = [net(), net()]
    optimizers = [sgd(model) for model in models]
    amp.initialize(models, optimizers, opt_level="O2", num_losses=2, verbosity=0)
    before = [state_of(*pair) for pair in zip(models, optimizers, strict=True)]
    backward(models[0], optimizers[0], overflow=True)
    backward(models[1], optimizers[1], loss_id=1)
    for optimizer in optimizers:
        optimizer.step()
    after = [state_of(*pair) for pair in zip(models, optimizers, strict=True)]
    assert [same(*pair) for pair in zip(before, after, strict=True)] == [True, False]


@pytest.mark.parametrize("level", LEVELS)
def test_one_bad_micro_batch_skips_the_whole_step_once(level: str) -> None:
    model, optimizer = start(level)
    before = state_of(model, optimizer)
    for seed, bad in ((1, False), (2, True), (3, False), (4, True)):
        backward(model, optimizer, seed, overflow=bad)
    assert scale() == 16384.0
    optimizer.step()
    assert same(state_of(model, optimizer), before)
    optimizer.zero_grad()
    train(model, optimizer, 5)
    assert not same(state_of(model, optimizer), before)


@pytest.mark.parametrize("to_none", [True, False], ids=["to None", "to zero"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_were_zeroed_after_an_overflow_are_stepped_with(level: str, to_none: bool) -> None:
    """Apex swallowed the good step."""
    wanted = []
    for overflow in (False, True):
        model, optimizer = start(level, loss_scale=1024.0)
        if overflow:
            backward(model, optimizer, 1, overflow=True)
            optimizer.zero_grad(set_to_none=to_none)
            model[1].reset_running_stats()
        backward(model, optimizer, 2)
        optimizer.step()
        wanted.append([one.detach().clone() for one in model.parameters()])
    assert same(*wanted)


@pytest.mark.parametrize("level", LEVELS)
def test_a_loop_that_never_zeroes_goes_on_after_a_skip(level: str) -> None:
    model, optimizer = start(level)
    backward(model, optimizer, 1, overflow=True)
    optimizer.step()
    before = state_of(model, optimizer)
    backward(model, optimizer, 2)
    optimizer.step()
    assert scale() == 32768.0
    assert all(one.isfinite().all() for one in state_of(model, optimizer))
    assert not same(state_of(model, optimizer), before)


def test_without_zero_grad_all_parameters_accumulate_alike() -> None:
    """Apex's O2 forgot the gradients of half-precision weights at each step, and kept those of batch norms."""
    found = {}
    for level in ("O0", "O2"):
        model, optimizer = start(level, optimizer=lambda model: sgd(model, lr=0.0, momentum=0.0), loss_scale=64.0)
        for _ in range(2):
            backward(model, optimizer, 1)
            optimizer.step()
        found[level] = gradients(optimizer)
    largest = max(float(one.abs().max()) for one in found["O0"])
    for one, other in zip(found["O0"], found["O2"], strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.01 * largest)


def test_the_scale_grows_after_the_window_and_stops_at_the_ceiling() -> None:
    model, optimizer = start("O2", max_loss_scale=2.0**14)
    scaler = amp._amp_state.loss_scalers[0]
    assert scale() == 2.0**14
    scaler._loss_scale, scaler._scale_seq_len = 2.0**12, 3
    train(model, optimizer, *range(6))
    assert (scale(), scaler._unskipped) == (2.0**14, 0)
    train(model, optimizer, *range(4))
    assert (scale(), scaler._unskipped) == (2.0**14, 1)


def test_the_floor_holds_and_is_no_lift() -> None:
    """In Apex the first overflow lifted a scale that was below the floor."""
    model, optimizer = start("O2", min_loss_scale=2.0**15)
    backward(model, optimizer, overflow=True)
    with pytest.warns(
        RuntimeWarning,
        match=r"at the scale 32768, below .* 0\.weight: 0 NaN, 1 Inf of 128",
    ):
        backward(model, optimizer, overflow=True)
    assert scale() == 2.0**15
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    backward(model, optimizer, overflow=True)
    assert scale() == 8.0


def test_without_a_floor_the_scale_never_comes_to_zero() -> None:
    """Apex's divided by zero after some 1,100 steps."""
    model, optimizer = start("O1")
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale, scaler._told = 2.0**-23, True
    for _ in range(4):
        backward(model, optimizer, overflow=True)
        optimizer.step()
    assert scale() == 2.0**-24


def test_lasting_nan_is_told_with_names() -> None:
    model, optimizer = start("O2")
    train(model, optimizer, 1)
    for attempt in range(8):
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
            plant(optimizer, torch.nan)
            if attempt == 7:
                block = pytest.warns(RuntimeWarning, match=r"nowhere Inf, for the eighth time.* 0\.weight: 1 NaN")
                block.__enter__()
        optimizer.step()
    block.__exit__(None, None, None)


def test_a_scale_that_starts_far_too_large_is_no_fault() -> None:
    """Its overflows are NaN alone, Inf minus Inf in the backward pass, and there are fourteen of them: no warning."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    steps = 0
    for _ in range(20):
        optimizer.zero_grad()
        before = model[0].weight.clone()
        with amp.scale_loss(1e4 * model(batch()[0]).sub(3.0).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        steps += not torch.equal(before, model[0].weight)
    assert scale() < 2.0**8
    assert steps >= 3


def test_the_counter_counts_blocks() -> None:
    """As in Apex, whose checkpoints have it: four blocks and a step are four."""
    model, optimizer = start("O1")
    for seed in range(4):
        backward(model, optimizer, seed)
    optimizer.step()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 4}}


# The optimizer stays its own


@pytest.mark.parametrize("level", LEVELS)
def test_methods_of_the_optimizer_are_not_replaced(level: str) -> None:
    _, optimizer = start(level)
    assert {"step", "zero_grad", "add_param_group", "state_dict"}.isdisjoint(vars(optimizer))
    assert optimizer.step.__self__ is optimizer


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["before", "after", "while a skip is pending"])
def test_schedulers_may_be_made_at_any_time_and_do_not_warn(level: str, when: str) -> None:
    model = net()
    optimizer = sgd(model)
    if when == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    if when == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    backward(model, optimizer, overflow=True)
    if when.startswith("while"):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    train(model, optimizer, 1)
    assert scale() == 32768.0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_takes_its_arguments(set_to_none: bool) -> None:
    model, optimizer = start("O2")
    backward(model, optimizer)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all(one.grad is None if set_to_none else not one.grad.any() for one in amp.master_params(optimizer))
    backward(model, optimizer)
    model.zero_grad()
    assert gradients(optimizer) == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_that_raises_leaves_gradients_and_casts(level: str) -> None:
    model, optimizer = start(level)

    def fail(*_: object) -> None:
        raise KeyError

    handle = optimizer.register_step_pre_hook(fail)
    backward(model, optimizer, overflow=True)
    with pytest.raises(KeyError):
        optimizer.step()
    handle.remove()
    before = state_of(model, optimizer)
    # The gradients that overflowed are there again, and the step is still to be skipped.
    backward(model, optimizer, 2)
    assert model[0](batch()[0].to(model[0].weight.dtype)).dtype is (torch.float32 if level == "O0" else torch.float16)
    optimizer.step()
    assert same(state_of(model, optimizer), before)
    train(model, optimizer, 3)
    assert not same(state_of(model, optimizer), before)


def test_hooks_of_the_user_see_no_gradients_in_a_skipped_step() -> None:
    model, optimizer = start("O2")
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(len(gradients(optimizer))))
    backward(model, optimizer)
    optimizer.step()
    backward(model, optimizer, overflow=True)
    optimizer.step()
    assert seen == [6, 0]


def test_other_optimizers_are_not_looked_at() -> None:
    start("O2")
    model = net()
    other = sgd(model)
    loss_of(model).backward()
    plant(other)
    other.step()
    assert not model[0].weight.isfinite().all()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_copies_are_complete_optimizers_that_initialize_has_not_seen(how: Any) -> None:
    model, optimizer = start("O2")
    train(model, optimizer, 1)
    other_model, other = how((model, optimizer))
    train(model, optimizer, 2)
    assert "_amp_stash" not in vars(other)
    loss_of(other_model, 2).backward()
    other.step()
    for one, twin in zip(amp.master_params(optimizer), amp.master_params(other), strict=True):
        torch.testing.assert_close(one, twin, rtol=0.0, atol=1e-3)


# What scripts read


def test_the_stash_lists_what_apexs_did() -> None:
    _, optimizer = start("O2")
    stash = optimizer._amp_stash
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_lazy_init()
    stash.lazy_init_called = True
    assert [tuple(one.shape) for one in stash.all_fp16_params] == [(16, 8), (16,), (4, 16), (4,)]
    assert [one.dtype for one in stash.all_fp32_from_fp16_params] == [torch.float32] * 4
    assert [tuple(one.shape) for one in stash.all_fp32_from_fp32_params] == [(16,), (16,)]
    assert [len(group) for group in stash.fp16_groups] == [4]
    assert [len(group) for group in stash.fp32_from_fp16_groups] == [4]
    assert [len(group) for group in stash.fp32_from_fp32_groups] == [2]
    for one in stash.all_fp32_from_fp16_params:
        with torch.no_grad():
            one.fill_(0.5)
    optimizer._master_params_to_model_params()
    assert all((one == 0.5).all() for one in stash.all_fp16_params)


def test_the_stash_without_masters() -> None:
    _, optimizer = start("O1")
    assert len(optimizer._amp_stash.all_fp32_params) == 6
    assert optimizer._amp_stash.all_fp16_params == []
    _, optimizer = start("O3")
    assert len(optimizer._amp_stash.all_fp16_params) == 6


def test_the_state_is_one_object_by_every_path() -> None:
    import importlib

    module = importlib.import_module("mezzo.apex.amp._amp_state")
    start("O2")
    assert module._amp_state is amp._amp_state
    assert amp._amp_state.opt_properties.master_weights is True
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**20
    assert scale() == 2.0**20


class Counting(torch.optim.SGD):
    """Does things of its own in a step: counts in its groups and itself, and decays weights that have no gradient."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for one in group["params"]:
                one.mul_(0.9)
        return super().step(closure)


@pytest.mark.parametrize("level", LEVELS)
def test_what_an_optimizer_does_by_itself_in_a_skipped_step_is_undone(level: str) -> None:
    """Apex did not call the step at all."""
    model, optimizer = start(level, optimizer=lambda model: Counting(model.parameters(), lr=0.01, momentum=0.9))
    train(model, optimizer, 1)
    before = state_of(model, optimizer)
    backward(model, optimizer, 2, overflow=True)
    optimizer.step()
    assert same(state_of(model, optimizer), before)
    assert optimizer.calls == 1
    assert optimizer.param_groups[0]["step"] == 1
    train(model, optimizer, 3)
    assert optimizer.calls == 2
    assert not same(state_of(model, optimizer), before)


@pytest.mark.parametrize("level", LEVELS)
def test_a_skip_of_pytorchs_optimizers_copies_no_state(level: str) -> None:
    model, optimizer = start(level)
    train(model, optimizer, 1)
    before = [value for entry in optimizer.state.values() for value in entry.values()]
    assert before
    backward(model, optimizer, 2, overflow=True)
    optimizer.step()
    after = [value for entry in optimizer.state.values() for value in entry.values()]
    assert all(one is other for one, other in zip(before, after, strict=True))
