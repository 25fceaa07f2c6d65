"""Where `torch.amp.GradScaler` works, mezzo's leaves the same bits: parameters, gradients, state, scale and tracker."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo.torch

from .runs import (
    BUSY,
    INF,
    NAN,
    Outcome,
    Script,
    assert_equal,
    each_class,
    each_loop,
    each_optimizer,
    make_batches,
    make_faults,
    make_net,
    make_optimizer,
    make_scaler,
    spoil,
)

torch_region = functools.partial(torch.autocast, "cpu", dtype=torch.float16)
mezzo_region = functools.partial(mezzo.torch.autocast, "cpu", dtype=torch.float16)
UNEVEN = {"init_scale": 1000.0, "growth_factor": 3.0, "backoff_factor": 0.7, "growth_interval": 3}


def assert_script_agrees(script: Script) -> Outcome:
    reference = script.run("torch")
    assert_equal(script.run("mezzo"), reference)
    return reference


def assert_moved_both_ways(outcome: Outcome) -> None:
    pairs = list(zip(outcome.scales, outcome.scales[1:], strict=False))
    assert any(before < after for before, after in pairs)
    assert any(before > after for before, after in pairs)


@each_optimizer
@each_loop
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_two_hundred_steps(optimizer: str, loop: str, micro_steps: int, clip: bool) -> None:
    outcome = assert_script_agrees(Script(optimizer, loop, clip=clip, micro_steps=micro_steps))
    assert len(outcome.scales) == 200
    assert_moved_both_ways(outcome)


@each_loop
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_scales_that_are_no_powers_of_two(loop: str, clip: bool) -> None:
    outcome = assert_script_agrees(Script("adam", loop, clip=clip, numbers=UNEVEN))
    assert_moved_both_ways(outcome)
    assert any(math.frexp(scale)[0] != 0.5 for scale in outcome.scales)


@each_loop
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_default_numbers(loop: str, clip: bool) -> None:
    assert_script_agrees(Script("adamw", loop, steps=60, clip=clip, numbers={}))


@each_loop
@pytest.mark.parametrize("interval", [1, 2])
def test_a_scale_that_grows_until_float32_ends(loop: str, interval: int) -> None:
    numbers = {"init_scale": 2.0**100, "growth_factor": 16.0, "growth_interval": interval}
    outcome = assert_script_agrees(Script("sgd", loop, steps=60, numbers=numbers, with_faults=False))
    assert max(outcome.scales) > 2.0**120


@each_loop
@pytest.mark.parametrize("init_scale", [2.0**16, 2.0**2, 2.0**-6], ids=["high", "low", "below one"])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_a_run_in_which_nobody_reads_the_scale(loop: str, init_scale: float, clip: bool) -> None:
    numbers = {"init_scale": init_scale, "growth_interval": 4}
    script = Script("adam", loop, steps=150, clip=clip, numbers=numbers, with_gradients=False, watched=False)
    assert len(assert_script_agrees(script).scales) == 1


@each_loop
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_a_scale_below_one(loop: str, clip: bool) -> None:
    # Not the gradients that a skipped fused step leaves: below one mezzo divides them before, to look at the quotients.
    numbers = {"init_scale": 2.0**-6, "growth_interval": 4}
    script = Script("adam", loop, steps=60, clip=clip, numbers=numbers, with_gradients=False)
    assert min(assert_script_agrees(script).scales) < 2.0**-6


@each_loop
@pytest.mark.parametrize(
    "edit",
    [lambda grad: grad.clone() * 0.5, lambda grad: grad.mul_(0.5), lambda grad: torch.full_like(grad, 0.125)],
    ids=["replaced", "in place", "forgotten"],
)
def test_gradients_changed_between_unscale_and_step_are_taken_as_they_are(loop: str, edit: Any) -> None:
    assert_script_agrees(Script("adam", loop, steps=60, edit=edit))


@each_loop
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_parameters_of_other_dtypes(loop: str, dtype: torch.dtype, clip: bool) -> None:
    assert_script_agrees(Script("adamw", loop, steps=100, dtype=dtype, clip=clip))


def several_optimizers(kind: str, loop: str, unscaled: tuple[int, ...]) -> Outcome:
    """Train two nets with one scaler and one loss; faults come to one of them at a time, or to both."""
    nets, outcome, dice = (make_net(0), make_net(1)), Outcome(), random.Random(3)
    optimizers = (make_optimizer("sgd", loop, nets[0].parameters()), make_optimizer("adam", loop, nets[1].parameters()))
    scaler = make_scaler(kind, **{**BUSY, "growth_interval": 2})
    for number, (x, y) in enumerate(make_batches(200)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        first, second = (nn.functional.mse_loss(net(x), y) for net in nets)
        scaler.scale(first + 2 * second).backward(retain_graph=True)
        scaler.scale(first * second).backward()
        for net, seed in zip(nets, (11, 12), strict=True):
            spoil(net.parameters(), make_faults(200, seed)[number], dice)
        for index in unscaled:
            scaler.unscale_(optimizers[index])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        outcome.note(scaler, [*nets[0].parameters(), *nets[1].parameters()])
    return outcome.finish([*nets[0].parameters(), *nets[1].parameters()], *optimizers)


@each_loop
@pytest.mark.parametrize("unscaled", [(), (0,), (1, 0)], ids=str)
def test_several_optimizers_skip_each_on_its_own(loop: str, unscaled: tuple[int, ...]) -> None:
    assert_equal(several_optimizers("mezzo", loop, unscaled), several_optimizers("torch", loop, unscaled))


class Words(nn.Module):
    """Two sparse embeddings and a dense layer; the gradients of the embeddings hold duplicate indices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(12, 6, sparse=True), nn.Embedding(4, 6, sparse=True)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens) + self.places(tokens % 4)).square().mean()


def sparse_run(kind: str, optimizer_class: Any, micro_steps: int, unscale: bool) -> Outcome:
    net, outcome, dice = Words(), Outcome(), random.Random(5)
    sparse = [net.words.weight, net.places.weight]
    optimizers = [optimizer_class(sparse, lr=0.05), torch.optim.SGD(net.head.parameters(), lr=0.05)]
    scaler, faults = make_scaler(kind, **BUSY), make_faults(100, 4)
    for number in range(100):
        net.zero_grad()
        for micro in range(micro_steps):
            tokens = torch.randint(12, (10,), generator=torch.Generator().manual_seed(100 * micro + number))
            scaler.scale(net(tokens)).backward()
        spoil(net.parameters(), faults[number], dice)
        if unscale:
            scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        outcome.note(scaler, net.parameters())
    return outcome.finish(net.parameters(), *optimizers)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch.optim.Adagrad makes sparse tensors unchecked
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_sparse_gradients(optimizer_class: Any, micro_steps: int, unscale: bool) -> None:
    one, other = (sparse_run(kind, optimizer_class, micro_steps, unscale) for kind in ("mezzo", "torch"))
    assert_equal(one, other)


def partial_run(kind: str, loop: str) -> Outcome:
    """Train with a frozen parameter, one that no loss reaches, and one that every other loss reaches."""
    net, outcome = make_net(), Outcome()
    net.extra, net.unused = nn.Linear(4, 4), nn.Linear(4, 4)
    net[2].bias.requires_grad_(False)
    optimizer = make_optimizer("adam", loop, net.parameters())
    scaler, faults = make_scaler(kind, **BUSY), make_faults(100, 6)
    for number, (x, y) in enumerate(make_batches(100)):
        optimizer.zero_grad(set_to_none=number % 3 > 0)
        output = net[2](net[1](net[0](x)))
        scaler.scale(nn.functional.mse_loss(net.extra(output) if number % 2 else output, y)).backward()
        spoil(net.parameters(), faults[number], random.Random(number))
        scaler.step(optimizer)
        scaler.update()
        outcome.note(scaler, net.parameters())
    return outcome.finish(net.parameters(), optimizer)


@each_loop
def test_parameters_without_gradients(loop: str) -> None:
    assert_equal(partial_run("mezzo", loop), partial_run("torch", loop))


def several_losses(kind: str, pack: Any) -> Outcome:
    net, outcome = make_net(), Outcome()
    optimizer = make_optimizer("adam", "foreach", net.parameters())
    scaler, faults = make_scaler(kind, **UNEVEN), make_faults(60)
    for number, (x, y) in enumerate(make_batches(60)):
        optimizer.zero_grad()
        output = net(x)
        losses = scaler.scale(pack([nn.functional.mse_loss(output, y), nn.functional.l1_loss(output, y)]))
        torch.autograd.backward(list(losses))
        spoil(net.parameters(), faults[number], random.Random(number))
        scaler.step(optimizer)
        scaler.update()
        outcome.note(scaler, net.parameters())
    return outcome.finish(net.parameters(), optimizer)


@pytest.mark.parametrize("pack", [list, tuple, iter], ids=["list", "tuple", "iterator"])
def test_several_losses_scaled_at_once(pack: Any) -> None:
    assert_equal(several_losses("mezzo", pack), several_losses("torch", pack))


def penalty_run(kind: str) -> Outcome:
    """Train with a gradient penalty, in the way of PyTorch's examples page."""
    net, outcome = make_net(), Outcome()
    optimizer = make_optimizer("sgd", "foreach", net.parameters())
    scaler = make_scaler(kind, **BUSY)
    for x, y in make_batches(40):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        scaled = torch.autograd.grad(scaler.scale(loss), list(net.parameters()), create_graph=True)
        norm = sum((grad / scaler.get_scale()).square().sum() for grad in scaled).sqrt()
        scaler.scale(loss + 0.1 * norm).backward()
        scaler.step(optimizer)
        scaler.update()
        outcome.note(scaler, net.parameters())
    return outcome.finish(net.parameters(), optimizer)


def test_gradient_penalty() -> None:
    assert_equal(penalty_run("mezzo"), penalty_run("torch"))


# float16 with this scale overflows in backward until the scale has come down: real overflows, none injected.
LARGE = {"init_scale": 2.0**22, "growth_interval": 10}


@each_loop
@pytest.mark.parametrize("region", [torch_region, mezzo_region], ids=["torch.autocast", "mezzo.autocast"])
def test_float16_regions_of_either_side_with_scalers_of_either_side(loop: str, region: Any) -> None:
    script = Script("adam", loop, steps=100, with_faults=False, numbers=LARGE)
    reference = Script(**{**vars(script), "region": torch_region}).run("torch")
    assert_moved_both_ways(reference)
    for kind in ("torch", "mezzo"):
        assert_equal(Script(**{**vars(script), "region": region}).run(kind), reference)


@each_class
@pytest.mark.parametrize("region", [torch_region, mezzo_region], ids=["torch.autocast", "mezzo.autocast"])
def test_a_region_without_scaler_is_one_with_a_disabled_scaler(scaler_class: type, region: Any) -> None:
    script = Script("sgd", steps=40, with_faults=False, clip=True, numbers={"enabled": False}, region=region)
    disabled = script.run(scaler_class)
    assert set(disabled.scales) == {1.0}
    assert set(disabled.trackers) == {0}
    assert_equal(Outcome(tensors=disabled.tensors), script.run(None))


@each_optimizer
@each_loop
def test_a_scaler_without_region_leaves_plain_training_as_it_is(optimizer: str, loop: str) -> None:
    # Powers of two scale and unscale float32 without rounding, so not even the last bit may differ.
    script = Script(optimizer, loop, steps=60, with_faults=False, numbers={"init_scale": 2.0**10})
    assert_equal(Outcome(tensors=script.run("mezzo").tensors), script.run(None))


class Reporting(torch.optim.SGD):
    """Returns what its step was called with."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        super().step()
        return args, kwargs


@each_class
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_step_passes_arguments_on_and_returns_what_the_optimizer_returns(scaler_class: type, enabled: bool) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = Reporting([weight], lr=0.5), scaler_class("cpu", enabled=enabled)
    scaler.scale(weight.sum()).backward()
    assert scaler.step(optimizer, lr_scale=3) == ((), {"lr_scale": 3})
    assert weight.tolist() == [0.5, 0.5]


@each_class
@each_loop
@pytest.mark.parametrize("fault", [INF, NAN], ids=str)
def test_a_skipped_step_returns_none_and_leaves_parameters_and_state(
    scaler_class: type, loop: str, fault: float
) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = make_optimizer("adam", loop, [weight]), scaler_class("cpu")
    scaler.scale((weight * fault).sum()).backward()
    assert scaler.step(optimizer) is None
    assert weight.tolist() == [1.0, 1.0]
    assert not any(isinstance(value, Tensor) and value.any() for value in optimizer.state[weight].values())
