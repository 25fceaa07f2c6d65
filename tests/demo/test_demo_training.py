"""A run of training: reproducible, free of side effects, and good at the task."""

from __future__ import annotations

import pytest
import torch

from mezzo.demo.data import load_split
from mezzo.demo.models import MODELS, build
from mezzo.demo.results import PRECISIONS, Plan, Way, ways
from mezzo.demo.train import Run

# Emulated, for these tests to take seconds on every processor; the emulation has tests of its own.
SMALL = Plan(epochs=1, batch_size=40, emulate_float16=True)


def train(name, precision, plan, digits, *, prepared=False):
    run = Run(name, digits, Way(precision, prepared), plan)
    for _ in range(plan.epochs):
        run.train_epoch()
    return run


@pytest.fixture(scope="module")
def few_digits():
    return load_split(seed=0, limit=160)


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in MODELS for way in ways(name)], ids=str)
def test_the_same_seed_gives_the_same_numbers(name, way, few_digits):
    """Bit for bit: losses, accuracy, memory, op counts."""
    first, second = (train(name, way.precision, SMALL, few_digits, prepared=way.prepared).result() for _ in range(2))
    assert first.train_losses == second.train_losses
    assert first.test_losses == second.test_losses
    assert first.test_accuracy == second.test_accuracy
    assert first.peak_memory_bytes == second.peak_memory_bytes
    assert (first.ops_by_dtype, first.casts) == (second.ops_by_dtype, second.casts)
    assert (first.scales, first.skipped_steps) == (second.scales, second.skipped_steps)
    assert first.held_bytes == second.held_bytes


def test_another_seed_gives_other_numbers(few_digits):
    plans = (Plan(epochs=1, batch_size=40, seed=seed) for seed in (0, 1))
    first, second = (train("conv net", "float32", plan, few_digits).result() for plan in plans)
    assert first.train_losses != second.train_losses


def test_weights_depend_on_the_seed_alone():
    """Neither on the global random state, nor does building change it."""
    before = torch.get_rng_state()
    first = build("transformer", seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        second = build("transformer", seed=3).state_dict()
    other = build("transformer", seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["position"], other["position"])


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_measuring_leaves_the_training_alone(precision, prepared, few_digits):
    """Taking the numbers in mid-training, which runs an extra pass, changes nothing that follows."""
    plan = Plan(epochs=2, batch_size=40, emulate_float16=True)
    plain = train("conv net", precision, plan, few_digits, prepared=prepared).result()
    interrupted = Run("conv net", few_digits, Way(precision, prepared), plan)
    interrupted.train_epoch()
    interrupted.result()
    interrupted.train_epoch()
    assert interrupted.result().train_losses == plain.train_losses
    assert interrupted.result().test_losses == plain.test_losses
    assert interrupted.result().scales == plain.scales


def test_only_the_low_precisions_pass_through_autocast(few_digits):
    plain, *mixed = (train("conv net", precision, SMALL, few_digits).result() for precision in PRECISIONS)
    assert (plain.ops_by_dtype, plain.casts) == ({}, 0)
    for run in mixed:
        # Three convolutions and the classifier, each with its weight, its bias and a float32 input to cast.
        assert run.ops_by_dtype[run.precision] >= 4
        assert run.casts >= 8
        assert run.peak_memory_bytes < plain.peak_memory_bytes


@pytest.mark.parametrize("name", MODELS)
def test_float16_takes_the_memory_of_bfloat16_and_the_scaler_s(name, few_digits):
    """The same widths, so the same bytes; the scaler has a few numbers of its own, the emulation none that count."""
    brain, half = (Run(name, few_digits, Way(precision), SMALL).result() for precision in ("bfloat16", "float16"))
    assert brain.peak_memory_bytes <= half.peak_memory_bytes <= brain.peak_memory_bytes + 256


def test_only_the_float16_run_scales(few_digits):
    plain, brain, half = (train("conv net", precision, SMALL, few_digits).result() for precision in PRECISIONS)
    for run in (plain, brain):
        assert (run.scales, run.skipped_steps, run.emulated) == ((), (), False)
    assert half.scales == (2.0**16,) * 3  # 120 digits in batches of 40: too few steps to grow
    assert half.emulated


LIVELY = Plan(epochs=10, batch_size=40, growth_interval=2, emulate_float16=True)


@pytest.fixture(scope="module")
def lively(few_digits):
    """A float16 run of 30 steps whose scale grows after every second good one."""
    return train("transformer", "float16", LIVELY, few_digits)


def test_the_scale_follows_the_steps(lively):
    """Doubled after two good steps in a row, halved at each skipped one; and it learns."""
    result = lively.result()
    scale, good = 2.0**16, 0
    assert len(result.scales) == 30
    for step, after in enumerate(result.scales, start=1):
        good = 0 if step in result.skipped_steps else good + 1
        scale = scale / 2 if good == 0 else scale
        if good == 2:
            scale, good = 2 * scale, 0
        assert after == scale, step
    assert 2 <= len(result.skipped_steps) <= 10
    assert result.train_losses[-1] < 0.5 * result.train_losses[0]


def test_skipped_steps_do_not_advance_the_schedule(lively):
    """The learning rate is the one-cycle schedule's at the number of steps that were made."""
    made = 30 - len(lively.result().skipped_steps)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=LIVELY.learning_rate)
    reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LIVELY.learning_rate, total_steps=30)
    for _ in range(made):
        optimizer.step()
        reference.step()
    assert lively.learning_rate == pytest.approx(reference.get_last_lr()[0], rel=1e-9)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_weights_are_evaluated_as_they_are_trained(precision, few_digits):
    """A prepared transformer gives the losses of autocast, in training and on the test part, emulated or not."""
    plain, prepared = (
        train("transformer", precision, SMALL, few_digits, prepared=way).result() for way in (False, True)
    )
    # Sums of AdamW's step may be rounded in another order.
    assert prepared.train_losses == pytest.approx(plain.train_losses, rel=1e-4)
    assert prepared.test_losses == pytest.approx(plain.test_losses, rel=1e-3)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_it_learns_the_digits_in_low_precision(name, precision):
    """Four epochs on all of the training part reach 96% on the test part; the demo trains longer."""
    result = train(name, precision, Plan(epochs=4, emulate_float16=True), load_split(seed=0)).result()
    assert result.test_accuracy > 0.96


@pytest.mark.parametrize("field", ["epochs", "batch_size", "growth_interval"])
def test_a_plan_without_work_is_refused(field):
    with pytest.raises(ValueError, match=rf"{field}=0; expected a whole number of at least 1"):
        Plan(**{field: 0})
