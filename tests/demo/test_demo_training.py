"""A run of training: reproducible, free of side effects, and good at the task."""

from __future__ import annotations

import pytest
import torch

from mezzo.demo.data import load_split
from mezzo.demo.models import MODELS, build
from mezzo.demo.results import PRECISIONS, Plan
from mezzo.demo.train import Run

SMALL = Plan(epochs=1, batch_size=40)


def train(name, precision, plan, digits):
    run = Run(name, digits, precision, plan)
    for _ in range(plan.epochs):
        run.train_epoch()
    return run


@pytest.fixture(scope="module")
def few_digits():
    return load_split(seed=0, limit=160)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_numbers(name, precision, few_digits):
    """Bit for bit: losses, accuracy, memory, op counts."""
    first, second = (train(name, precision, SMALL, few_digits).result() for _ in range(2))
    assert first.train_losses == second.train_losses
    assert first.test_losses == second.test_losses
    assert first.test_accuracy == second.test_accuracy
    assert first.peak_memory_bytes == second.peak_memory_bytes
    assert (first.ops_by_dtype, first.casts) == (second.ops_by_dtype, second.casts)


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


def test_measuring_leaves_the_training_alone(few_digits):
    """Taking the numbers in mid-training, which runs an extra pass, changes nothing that follows."""
    plan = Plan(epochs=2, batch_size=40)
    plain = train("conv net", "bfloat16", plan, few_digits).result()
    interrupted = Run("conv net", few_digits, "bfloat16", plan)
    interrupted.train_epoch()
    interrupted.result()
    interrupted.train_epoch()
    assert interrupted.result().train_losses == plain.train_losses
    assert interrupted.result().test_losses == plain.test_losses


def test_only_the_bfloat16_run_passes_through_autocast(few_digits):
    plain, mixed = (train("conv net", precision, SMALL, few_digits).result() for precision in PRECISIONS)
    assert (plain.ops_by_dtype, plain.casts) == ({}, 0)
    # Three convolutions and the classifier, each with its weight, its bias and a float32 input to cast.
    assert mixed.ops_by_dtype["bfloat16"] >= 4
    assert mixed.casts >= 8
    assert mixed.peak_memory_bytes < plain.peak_memory_bytes


@pytest.mark.parametrize("name", MODELS)
def test_it_learns_the_digits_in_bfloat16(name):
    """Four epochs on all of the training part reach 96% on the test part; the demo trains longer."""
    result = train(name, "bfloat16", Plan(epochs=4), load_split(seed=0)).result()
    assert result.test_accuracy > 0.96


@pytest.mark.parametrize("field", ["epochs", "batch_size"])
def test_a_plan_without_work_is_refused(field):
    with pytest.raises(ValueError, match=rf"{field}=0; expected a whole number of at least 1"):
        Plan(**{field: 0})
