"""What is seen of compensated and stochastically rounded weights that are stepped in blocks: by hooks, and in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mezzo.torch
from mezzo.torch.masters.blocked_pass import BLOCK
from mezzo.torch.masters.params import Master, masters_in
from mezzo.torch.masters.single_pass import has_values

from .blocked_runs import KINDS, Kind, assert_same, both, fused_calls, modes, peak_of


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The size of a block is that for one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# What others see


@modes
def test_the_version_of_a_weight_moves(mode: dict[str, Any]) -> None:
    run = both(KINDS["adamw"], mode)[0]
    before = [one._version for one in run.model.all]
    run.step()
    moved = [one._version > version for one, version in zip(run.model.all, before, strict=True)]
    assert moved == [one.numel() > 0 for one in run.model.all]


@modes
def test_a_write_between_steps_wins(mode: dict[str, Any]) -> None:
    runs = both(KINDS["adamw"], mode)
    for run in runs:
        run.step()
        with torch.no_grad():
            run.model.all[4].fill_(7.0)
        run.step()
    assert_same(runs[0].tensors(), runs[1].tensors())
    assert (runs[0].model.all[4] > 6.9).all()


@modes
@pytest.mark.parametrize("when", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_sees_values_and_may_change_them(mode: dict[str, Any], when: str) -> None:
    runs = both(KINDS["adamw"], mode)
    seen: list[list[Tensor]] = []
    for run in runs:
        found: list[Tensor] = []

        def hook(optimizer: torch.optim.Optimizer, *_: Any, found: list[Tensor] = found) -> None:
            with torch.no_grad():
                for one in masters_in(optimizer):
                    one.mul_(0.9)  # type: ignore[attr-defined]
                    found.append(one.values().clone())

        getattr(run.optimizer, when)(hook)
        run.step()
        run.step()
        seen.append(found)
    assert all(map(torch.equal, *seen))
    assert_same(runs[0].tensors(), runs[1].tensors())


@modes
def test_lost_updates_are_counted_as_with_whole_tensors(mode: dict[str, Any], one_thread: None) -> None:
    counts, calls = [], []
    for run in both(KINDS["adamw"], mode, [(BLOCK,), (9,)]):
        for group in run.optimizer.param_groups:
            group.update(lr=1e-4, weight_decay=0.0)
        with mezzo.torch.count_lost_updates(run.optimizer) as counted:
            calls += [fused_calls(run.step), fused_calls(run.step)]
        counts.append(dict(counted.by_parameter))
    assert counts[0] == counts[1]
    assert sum(one.updates for one in counts[0].values()) > 0
    assert calls == [2, 2, 1, 1]


# Memory


@modes
@pytest.mark.parametrize("kind", [KINDS["adamw"], KINDS["sgd momentum"]], ids=["adamw", "sgd"])
def test_the_state_is_made_as_for_whole_tensors(mode: dict[str, Any], kind: Kind) -> None:
    runs = both(kind, mode, [(8, 4, 3, 3), (6, 5), ()])
    for run in runs:
        run.step()
    assert_same(runs[0].tensors(), runs[1].tensors())
    for one in runs[0].masters:
        for state in runs[0].optimizer.state[one].values():
            assert state.untyped_storage().nbytes() == state.numel() * state.element_size()


@modes
def test_between_steps_there_are_no_values_but_those_that_are_kept(mode: dict[str, Any]) -> None:
    run = both(KINDS["adamw"], mode, [(6, 5), (7,)])[0]
    run.step()
    kept = "masters" not in mode
    assert all(has_values(one) is kept for one in run.masters)
    assert all(isinstance(one, Master) for one in run.masters)


@modes
def test_no_float32_tensor_of_the_size_of_a_parameter_is_made(mode: dict[str, Any], one_thread: None) -> None:
    size = 16 * BLOCK
    run, whole = both(KINDS["adamw"], mode, [(size,)])
    states, peaks = 2 * 4 * size, []
    for one in (run, whole):
        one.give_gradients()
        peaks.append(peak_of(one.optimizer.step))
    # Two buffers of a block, and a dozen tensors of the quarter of a block that is rounded at a time.
    assert peaks[0] - states < 5 * 4 * BLOCK < 4 * size
    assert peaks[1] - states >= 4 * size
    run.give_gradients()
    assert peak_of(run.optimizer.step) < 5 * 4 * BLOCK
