"""`SteppedScheduler`: a schedule that counts the steps that were made, for each kind of scheduler, and its checkpoints."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

from mezzo.torch import GradScaler
from mezzo.torch.scaling.schedules import SteppedScheduler

INF = math.inf
# The first steps are skipped, and some in between: 5 of 9 are made.
RUN = [INF, INF, 1.0, 1.0, INF, 1.0, math.nan, 1.0, 1.0]


def halved(step: int) -> float:
    return 0.5**step


def sequential(optimizer: Optimizer) -> lr_scheduler.SequentialLR:
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.ExponentialLR(optimizer, 0.5)], milestones=[2])


def chained(optimizer: Optimizer) -> lr_scheduler.ChainedScheduler:
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    return lr_scheduler.ChainedScheduler([warmup, lr_scheduler.ExponentialLR(optimizer, 0.5)])


KINDS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, halved),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=8),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=8),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, base_lr=0.1, max_lr=1.0, step_size_up=3),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
}

kinds = pytest.mark.parametrize("kind", KINDS)


class Loop:
    """A training loop with a scaler, of one weight."""

    def __init__(self, make: Callable[..., Any], *, enabled: bool = True, fused: bool = False) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = SGD([self.weight], lr=1.0, momentum=0.9, fused=fused)
        self.scaler = GradScaler("cpu", init_scale=2.0**8, enabled=enabled)
        self.scheduler = SteppedScheduler(make(self.optimizer), self.scaler)
        self.rates: list[float] = []

    def train(self, factors: Sequence[float]) -> None:
        for factor in factors:
            self.optimizer.zero_grad()
            self.scaler.scale((self.weight.square() * factor).sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def run(self, factors: Sequence[float]) -> list[float]:
        for factor in factors:
            self.train([factor])
            self.scheduler.step()
            self.rates.append(self.optimizer.param_groups[0]["lr"])
        return self.rates


def rates_without_scaler(make: Callable[..., Any], factors: Sequence[float]) -> list[float]:
    """Give the learning rates of a loop that leaves out the batches whose steps the scaler skips."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = SGD([weight], lr=1.0, momentum=0.9)
    scheduler = make(optimizer)
    rates = []
    for factor in factors:
        if math.isfinite(factor):
            optimizer.zero_grad()
            (weight.square() * factor).sum().backward()
            optimizer.step()
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@kinds
def test_skipped_steps_do_not_count_and_nothing_warns(kind):
    rates = Loop(KINDS[kind]).run(RUN)
    assert rates == rates_without_scaler(KINDS[kind], RUN)
    assert len(set(rates)) == 6


def test_a_scheduler_of_pytorchs_alone_warns_and_runs_ahead():
    loop = Loop(KINDS["LambdaLR"])
    loop.scheduler = lr_scheduler.LambdaLR(loop.optimizer, halved)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step\(\)"):
        assert loop.run([INF]) == [0.5]


@kinds
def test_an_optimizer_that_decides_on_the_device(kind):
    assert Loop(KINDS[kind], fused=True).run(RUN) == rates_without_scaler(KINDS[kind], RUN)


@kinds
def test_with_a_disabled_scaler_each_call_advances(kind):
    loop = Loop(KINDS[kind], enabled=False)
    assert loop.run([1.0] * 6) == rates_without_scaler(KINDS[kind], [1.0] * 6)


def test_once_per_epoch():
    loop = Loop(KINDS["LambdaLR"])
    for epoch, rate in (([INF, 1.0, 1.0], 0.5), ([INF, INF], 0.5), ([1.0, INF], 0.25)):
        loop.train(epoch)
        loop.scheduler.step()
        assert loop.scheduler.get_last_lr() == [rate]


def test_more_calls_than_steps_advance_once():
    loop = Loop(KINDS["LambdaLR"])
    loop.scheduler.step()
    assert loop.scheduler.last_epoch == 0
    loop.train([1.0])
    loop.scheduler.step()
    loop.scheduler.step()
    assert loop.scheduler.last_epoch == 1


def test_metrics_are_handed_on_and_those_of_skipped_steps_are_not():
    loop = Loop(lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5))
    seen = []
    for factor, metric in ((1.0, 3.0), (INF, 9.0), (1.0, 2.0), (1.0, 4.0), (1.0, torch.tensor(5.0))):
        loop.train([factor])
        loop.scheduler.step(metric)
        seen.append((loop.scheduler.best, loop.optimizer.param_groups[0]["lr"]))
    assert seen == [(3.0, 1.0), (3.0, 1.0), (2.0, 1.0), (2.0, 0.5), (2.0, 0.25)]
    loop.train([1.0])
    loop.scheduler.step(metrics=6.0)
    assert loop.optimizer.param_groups[0]["lr"] == 0.125


def test_two_optimizers_of_one_scaler_are_told_apart():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [SGD([weight], lr=1.0) for weight in weights]
    scaler = GradScaler("cpu")
    schedulers = [SteppedScheduler(lr_scheduler.ExponentialLR(each, 0.5), scaler) for each in optimizers]
    scaler.scale(weights[0] * INF + weights[1]).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for scheduler in schedulers:
        scheduler.step()
    assert [scheduler.get_last_lr() for scheduler in schedulers] == [[1.0], [0.5]]


def test_steps_from_before_it_was_made_do_not_count():
    loop = Loop(KINDS["LambdaLR"])
    loop.train([1.0, 1.0])
    scheduler = SteppedScheduler(loop.scheduler._scheduler, loop.scaler)
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]
    loop.train([1.0])
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


# What passes through


def test_what_one_reads_sets_and_calls_is_the_schedulers():
    loop = Loop(KINDS["CosineAnnealingLR"])
    inner, outer = loop.scheduler._scheduler, loop.scheduler
    assert outer.optimizer is loop.optimizer
    assert outer.T_max == 8
    assert outer.get_last_lr() == [1.0]
    outer.T_max = 4
    assert inner.T_max == 4
    assert "T_max" not in vars(outer)
    assert repr(outer) == f"SteppedScheduler({inner!r})"
    with pytest.raises(AttributeError, match="nothing"):
        outer.nothing  # noqa: B018


@kinds
def test_checkpoints_fit_the_scheduler_with_and_without(kind):
    whole = Loop(KINDS[kind]).run(RUN)
    first = Loop(KINDS[kind])
    first.run(RUN[:4])
    state = first.scheduler.state_dict()
    assert state.keys() == first.scheduler._scheduler.state_dict().keys()

    second = Loop(KINDS[kind])
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.scheduler.load_state_dict(dict(state))  # CyclicLR takes out what it has read
    second.scaler.load_state_dict(first.scaler.state_dict())
    assert second.run(RUN[4:]) == whole[4:]

    bare = KINDS[kind](SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9))
    bare.load_state_dict(state)
    assert bare.get_last_lr() == first.scheduler.get_last_lr()


def test_steps_from_before_a_checkpoint_was_loaded_do_not_count():
    loop = Loop(KINDS["LambdaLR"])
    state = loop.scheduler.state_dict()
    loop.train([1.0])
    loop.scheduler.load_state_dict(state)
    loop.scheduler.step()
    assert loop.scheduler.get_last_lr() == [1.0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda loop: pickle.loads(pickle.dumps(loop))])
@pytest.mark.parametrize("kind", ["LambdaLR", "OneCycleLR", "ChainedScheduler"])
def test_copies_of_a_whole_loop_go_on_by_themselves(kind, duplicate):
    loop = Loop(KINDS[kind])
    loop.run(RUN[:4])
    twin = duplicate(loop)
    assert twin.scheduler.optimizer is twin.optimizer
    whole = Loop(KINDS[kind]).run(RUN)
    assert twin.run(RUN[4:]) == whole
    assert loop.run(RUN[4:]) == whole


# What it does not take


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda optimizer: optimizer, r"got a torch.optim.SGD as the scheduler; .* Make the scheduler first"),
        (lambda optimizer: lr_scheduler.LambdaLR, "got the class LambdaLR as the scheduler"),
        (lambda optimizer: None, "got None of type NoneType as the scheduler"),
    ],
)
def test_what_is_no_scheduler_is_refused(given, text):
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(TypeError, match=text):
        SteppedScheduler(given(optimizer), GradScaler("cpu"))


@pytest.mark.parametrize(
    ("scaler", "text"),
    [
        (
            lambda: torch.amp.GradScaler("cpu"),
            r"got a torch.amp.GradScaler as the scaler; it takes a mezzo.torch.GradScaler",
        ),
        (lambda: GradScaler, "got the class GradScaler as the scaler"),
        (lambda: 65536.0, "got 65536.0 of type float as the scaler"),
    ],
)
def test_what_is_no_scaler_of_mezzos_is_refused(scaler, text):
    optimizer = Adam([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match=text):
        SteppedScheduler(lr_scheduler.LambdaLR(optimizer, halved), scaler())


def test_the_two_the_wrong_way_round_are_refused():
    optimizer = Adam([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match=r"got a mezzo.torch.GradScaler as the scheduler"):
        SteppedScheduler(GradScaler("cpu"), lr_scheduler.LambdaLR(optimizer, halved))


def test_an_object_that_behaves_as_a_scheduler_is_taken():
    class Own:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer, self.calls = optimizer, []

        def step(self, *args: Tensor) -> None:
            self.calls.append(args)

    loop = Loop(Own)
    loop.run([INF, 1.0])
    assert loop.scheduler.calls == [()]
