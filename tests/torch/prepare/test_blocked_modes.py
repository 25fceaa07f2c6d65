"""Compensated and stochastically rounded weights are stepped in blocks, to the bits that whole tensors give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mezzo.torch
from mezzo.torch.masters.blocked_pass import BLOCK
from mezzo.torch.masters.params import masters_in

from .blocked_runs import BF16, KINDS, SHAPES, AdamW, Kind, Run, Weights, assert_same, both, fused_calls, modes


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The size of a block is that for one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The same bits


@modes
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_steps_in_blocks_are_those_of_whole_tensors(mode: dict[str, Any], kind: Kind, one_thread: None) -> None:
    runs = both(kind, mode, [*SHAPES, (BLOCK + 9,)])
    for _ in range(3):
        for run in runs:
            run.step()
    assert_same(runs[0].tensors(), runs[1].tensors())
    assert runs[0].owner.rounds == (3 if "rounding" in mode else 0)


@modes
def test_the_number_of_threads_changes_nothing(mode: dict[str, Any], one_thread: None) -> None:
    runs = [Run(torch.optim.AdamW, mode, [(2 * BLOCK + 33,), (7,)]) for _ in range(2)]
    for threads, run in enumerate(runs, 1):
        torch.set_num_threads(threads)
        run.step()
    assert_same(runs[0].tensors(), runs[1].tensors())


@modes
def test_nothing_is_left_to_the_optimizer(mode: dict[str, Any], one_thread: None) -> None:
    in_blocks, whole = both(KINDS["adamw"], mode, [(BLOCK,), (9,)])
    assert [fused_calls(in_blocks.step), fused_calls(whole.step)] == [2, 1]


@modes
def test_gradients_may_be_float32_in_part(mode: dict[str, Any]) -> None:
    runs = both(KINDS["adamw"], mode)
    for _ in range(2):
        for run in runs:
            run.give_gradients()
            for one in run.masters[1::2]:
                one.grad = one.model_param.grad.float() * 1.01  # type: ignore[union-attr]
            run.optimizer.step()
            assert {one.grad.dtype for one in run.model.all} == {BF16, torch.float32}
            run.optimizer.zero_grad()
    assert_same(runs[0].tensors(), runs[1].tensors())


@modes
@pytest.mark.parametrize("kind", [KINDS["adamw"], KINDS["sgd momentum"]], ids=["adamw", "sgd"])
def test_gradients_are_divided_by_the_scale(mode: dict[str, Any], kind: Kind) -> None:
    runs = both(kind, mode)
    for run in runs:
        run.optimizer.grad_scale, run.optimizer.found_inf = torch.tensor(3.0), torch.zeros(())
        run.step()
        run.step()
    assert_same(runs[0].tensors(), runs[1].tensors())


@modes
def test_groups_and_optimizers_draw_from_streams_of_their_own(mode: dict[str, Any]) -> None:
    found = []
    for cls in (torch.optim.AdamW, AdamW):
        model = Weights([(40,), (50,), (60,), (70,)])
        first, second, third, fourth = model.all
        groups: Any = [{"params": [first], "lr": 0.1}, {"params": [second, third]}]
        optimizers = [cls(groups, lr=0.01, fused=True), cls([fourth], lr=0.01, fused=True)]
        mezzo.torch.prepare(model, optimizers, low="**", **mode)
        for _ in range(3):
            for one in model.all:
                one.grad = torch.ones_like(one)
            for optimizer in optimizers:
                optimizer.step()
        rounds = masters_in(optimizers[0])[0].owner.rounds
        found.append([one.detach() for one in model.all] + [torch.tensor(rounds)])
    assert all(map(torch.equal, *found))


@modes
def test_a_closure_evaluates_the_model(mode: dict[str, Any]) -> None:
    runs = both(KINDS["adamw"], mode, [(4, 6), (5,)])
    for run in runs:
        for _ in range(3):

            def closure(run: Run = run) -> Tensor:
                run.optimizer.zero_grad()
                loss = torch.stack([one.float().square().sum() for one in run.model.all]).sum()
                loss.backward()
                return loss.detach()

            run.optimizer.step(closure)
    assert_same(runs[0].tensors(), runs[1].tensors())


# What is left as it is


@modes
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_that_is_skipped_leaves_every_bit_and_is_not_counted(mode: dict[str, Any], kind: Kind) -> None:
    run = both(kind, mode)[0]
    run.step()
    before, rounds = run.copies(), run.owner.rounds
    run.optimizer.grad_scale, run.optimizer.found_inf = torch.tensor(2.0), torch.ones(())
    run.give_gradients()
    run.model.all[0].grad.fill_(torch.nan)
    run.optimizer.step()
    assert_same(before, run.tensors())
    assert run.owner.rounds == rounds


@modes
def test_after_a_first_step_that_is_skipped_the_run_goes_on_like_whole_tensors(mode: dict[str, Any]) -> None:
    runs = both(KINDS["sgd momentum"], mode)
    for run in runs:
        run.optimizer.found_inf = torch.ones(())
        run.step()
        run.optimizer.found_inf = None
    # PyTorch's own has momentum from then on.
    assert not runs[0].optimizer.state
    runs = both(KINDS["adamw"], mode)
    for run in runs:
        for found in (torch.ones(()), torch.zeros(()), torch.ones(()), torch.zeros(())):
            run.optimizer.found_inf = found
            run.step()
    assert_same(runs[0].tensors(), runs[1].tensors())


@modes
def test_a_parameter_without_gradient_stays(mode: dict[str, Any]) -> None:
    runs = both(KINDS["adamw"], mode)
    for run in runs:
        run.step()
        run.give_gradients()
        run.model.all[4].grad = None
        run.optimizer.step()
    assert_same(runs[0].tensors(), runs[1].tensors())


@modes
def test_a_step_that_fails_leaves_weights_that_the_next_step_goes_on_from(mode: dict[str, Any]) -> None:
    def fail() -> Any:
        raise RuntimeError("in the closure")

    runs = both(KINDS["adamw"], mode)
    for run in runs:
        run.step()
    before = runs[0].copies()
    with pytest.raises(RuntimeError, match="in the closure"):
        runs[0].optimizer.step(fail)
    assert_same(before, runs[0].tensors())
    # By a hook, after which the values are there.
    handle = runs[0].optimizer.register_step_pre_hook(lambda *_: fail())
    with pytest.raises(RuntimeError, match="in the closure"):
        runs[0].optimizer.step()
    handle.remove()
    for run in runs:
        for one in run.model.all:
            one.data.mul_(0.5)
        run.step()
    assert_same(runs[0].tensors(), runs[1].tensors())


# Some that one pass cannot do


@modes
def test_a_gradient_in_another_order_of_memory_goes_the_long_way(mode: dict[str, Any]) -> None:
    runs = both(KINDS["adamw"], mode, [(4,), (6, 5), (7,)])
    calls = []
    for run in runs:
        for _ in range(2):
            run.give_gradients()
            run.model.all[1].grad = run.model.all[1].grad.t().contiguous().t()
            calls.append(fused_calls(run.optimizer.step))
    assert_same(runs[0].tensors(), runs[1].tensors())
    # Random numbers are drawn for all parameters in one way.
    assert calls == ([1, 1, 1, 1] if "rounding" in mode else [2, 2, 1, 1])


@modes
def test_a_group_that_is_not_fused_goes_the_long_way(mode: dict[str, Any]) -> None:
    found = []
    for cls in (torch.optim.AdamW, AdamW):
        model = Weights([(40,), (6, 5), (70,)])
        groups: Any = [
            {"params": [one], "fused": fused} for one, fused in zip(model.all, (True, False, True), strict=True)
        ]
        optimizer = cls(groups, lr=0.01)
        mezzo.torch.prepare(model, optimizer, low="**", **mode)
        for _ in range(3):
            for one in model.all:
                one.grad = torch.ones_like(one)
            optimizer.step()
        found.append([one.detach() for one in model.all])
    assert all(map(torch.equal, *found))
