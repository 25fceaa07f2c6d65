"""`count_lost_updates`: how many updates change nothing, and how many only a master sees."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as hooks

import mezzo.torch
from mezzo.torch.masters.lost_updates import LostUpdates, UpdateCounts, count_lost_updates
from tests.process_groups import end_process_group


def parameter(values: list[float], dtype: torch.dtype = torch.bfloat16, gradient: list[float] | None = None) -> Any:
    made = nn.Parameter(torch.tensor(values, dtype=dtype))
    made.grad = torch.tensor([1.0] * len(values) if gradient is None else gradient, dtype=dtype)
    return made


def counts(counted: LostUpdates) -> tuple[int, int, int]:
    return counted.updates, counted.lost, counted.waiting


# Optimizers that were not prepared


def test_an_update_below_half_a_step_of_the_weight_is_lost() -> None:
    # bfloat16's step at 1.0 is 2**-7 upwards and 2**-8 downwards: 1e-3 is less than half of either. At 0.01 it is not.
    optimizer = torch.optim.SGD([parameter([1.0, 0.01, -1.0, 0.0])], lr=1e-3)
    with count_lost_updates(optimizer) as counted:
        optimizer.step()
    assert counts(counted) == (4, 2, 0)
    assert counted.fraction == 0.5
    assert counted.steps == 1


def test_the_same_updates_are_not_lost_in_float32() -> None:
    optimizer = torch.optim.SGD([parameter([1.0, 0.01, -1.0, 0.0], torch.float32)], lr=1e-3)
    with count_lost_updates(optimizer) as counted:
        optimizer.step()
    assert counts(counted) == (4, 0, 0)


def test_elements_without_gradient_are_no_updates() -> None:
    weight = parameter([1.0, 1.0, 0.01], gradient=[0.0, 1.0, 1.0])
    idle = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([weight, idle], lr=1e-3)
    with count_lost_updates(optimizer) as counted:
        optimizer.step()
    assert counted.by_parameter == {0: UpdateCounts(2, 1, 0)}


def test_nothing_counted_is_a_fraction_of_zero() -> None:
    with count_lost_updates(torch.optim.SGD([parameter([1.0])], lr=1.0)) as counted:
        pass
    assert (counts(counted), counted.fraction, counted.steps, dict(counted.by_parameter)) == ((0, 0, 0), 0.0, 0, {})


def test_steps_add_up_and_can_be_read_in_between() -> None:
    optimizer = torch.optim.SGD([parameter([1.0, 0.01])], lr=1e-3)
    with count_lost_updates(optimizer) as counted:
        for done in range(1, 4):
            optimizer.step()
            assert counts(counted) == (2 * done, done, 0)
            assert counted.steps == done
    assert repr(counted) == "LostUpdates(updates=6, lost=3, waiting=0, steps=3)"


def test_parameters_are_told_apart_by_index_over_all_groups() -> None:
    first, second, third = parameter([1.0]), parameter([0.01, 1.0]), parameter([1.0, 1.0, 1.0])
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second, third], "lr": 1.0}], lr=1e-3)
    with count_lost_updates(optimizer) as counted:
        optimizer.step()
    assert counted.by_parameter == {0: (1, 1, 0), 1: (2, 0, 0), 2: (3, 0, 0)}


def test_parameters_are_told_apart_by_name_where_the_optimizer_knows_it() -> None:
    optimizer = torch.optim.SGD([("weight", parameter([1.0])), ("bias", parameter([0.01]))], lr=1e-3)
    with count_lost_updates(optimizer) as counted:
        optimizer.step()
    assert counted.by_parameter == {"weight": (1, 1, 0), "bias": (1, 0, 0)}


def test_what_is_counted_cannot_be_written_to() -> None:
    with count_lost_updates(torch.optim.SGD([parameter([1.0])])) as counted:
        pass
    with pytest.raises(TypeError, match="does not support item assignment"):
        counted.by_parameter["weight"] = UpdateCounts(1, 1, 1)  # type: ignore[index]


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("foreach", [False, True])
def test_counts_are_those_of_a_comparison_by_hand(cls: Callable[..., torch.optim.Optimizer], foreach: bool) -> None:
    random = torch.Generator().manual_seed(0)
    weight = nn.Parameter((torch.randn(2000, generator=random) * 0.3).bfloat16())
    optimizer = cls([weight], lr=1e-3, foreach=foreach)
    updates = lost = 0
    with count_lost_updates(optimizer) as counted:
        for _ in range(3):
            weight.grad = (torch.randn(2000, generator=random)).relu().bfloat16()
            before = weight.detach().clone()
            optimizer.step()
            updates += int((weight.grad != 0).sum())
            lost += int(((weight.grad != 0) & (weight == before)).sum())
    assert 0 < lost < updates
    assert counts(counted) == (updates, lost, 0)


def test_a_closure_s_gradients_are_counted() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 0.01], dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    with count_lost_updates(optimizer) as counted:
        optimizer.step(closure)  # type: ignore[arg-type]
    assert counts(counted) == (2, 1, 0)


def test_sparse_gradients_are_counted() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-3)
    table(torch.tensor([1, 1, 3])).sum().backward()
    with count_lost_updates(optimizer) as counted:
        optimizer.step()
    assert counts(counted) == (4, 0, 0)


def test_a_learning_rate_of_zero_loses_all() -> None:
    optimizer = torch.optim.SGD([parameter([1.0, 0.01], torch.float32)], lr=0.0)
    with count_lost_updates(optimizer) as counted:
        optimizer.step()
    assert counted.fraction == 1.0


def test_parameters_added_later_are_counted() -> None:
    optimizer = torch.optim.SGD([parameter([1.0])], lr=1e-3)
    with count_lost_updates(optimizer) as counted:
        optimizer.step()
        optimizer.add_param_group({"params": [parameter([0.01])]})
        optimizer.step()
    assert counted.by_parameter == {0: (2, 2, 0), 1: (1, 0, 0)}


def test_of_distributed_tensors_the_local_shards_are_counted(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = parameter([1.0, 0.01, 1.0])
        weight = nn.Parameter(DTensor.from_local(plain.detach(), mesh, [Shard(0)]))
        weight.grad = DTensor.from_local(plain.grad, mesh, [Shard(0)])
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        with count_lost_updates(optimizer) as counted:
            optimizer.step()
    finally:
        end_process_group()
    assert counts(counted) == (3, 2, 0)


# What is left behind, and what is not looked at


def test_the_training_is_the_same_when_counted() -> None:
    def trained(counting: bool) -> Tensor:
        torch.manual_seed(0)
        net = nn.Linear(8, 8).bfloat16()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        with count_lost_updates(optimizer) if counting else nullcontext():
            for _ in range(5):
                optimizer.zero_grad()
                net(torch.randn(4, 8).bfloat16()).square().sum().backward()
                optimizer.step()
        return net.weight.detach()

    assert torch.equal(trained(True), trained(False))


def test_no_hook_is_left_behind_even_after_an_error() -> None:
    optimizer = torch.optim.SGD([parameter([1.0])], lr=1e-3)
    with count_lost_updates(optimizer):  # with the first one, mezzo's own hooks come to stay
        pass
    before = [*hooks._global_optimizer_pre_hooks], [*hooks._global_optimizer_post_hooks]
    with pytest.raises(KeyError), count_lost_updates(optimizer) as counted:
        optimizer.step()
        raise KeyError
    assert ([*hooks._global_optimizer_pre_hooks], [*hooks._global_optimizer_post_hooks]) == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    optimizer.step()
    assert counted.steps == 1


def test_steps_of_other_optimizers_are_not_counted() -> None:
    weight = parameter([1.0])
    optimizer, other = torch.optim.SGD([weight], lr=1e-3), torch.optim.SGD([weight], lr=1e-3)
    with count_lost_updates(optimizer) as counted:
        other.step()
        copy.deepcopy(optimizer).step()
    assert (counted.steps, counted.updates) == (0, 0)


def test_two_counts_of_one_optimizer_count_the_same() -> None:
    optimizer = torch.optim.SGD([parameter([1.0, 0.01])], lr=1e-3)
    with count_lost_updates(optimizer) as outer, count_lost_updates(optimizer) as inner:
        optimizer.step()
    assert counts(outer) == counts(inner) == (2, 1, 0)


def test_a_step_that_raises_counts_nothing() -> None:
    optimizer = torch.optim.SGD([parameter([1.0])], lr=1e-3)

    def closure() -> float:
        raise KeyError

    with count_lost_updates(optimizer) as counted:
        with pytest.raises(KeyError):
            optimizer.step(closure)
        assert counted.steps == 0
        optimizer.step()
    assert counted.steps == 1
    assert counts(counted) == (1, 1, 0)


def test_a_step_that_calls_its_base_class_s_is_counted_once() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.optim.SGD([parameter([1.0])])  # now the step of the base class calls hooks too
    optimizer = Own([parameter([1.0, 0.01])], lr=1e-3)
    with count_lost_updates(optimizer) as counted:
        optimizer.step()
    assert (counts(counted), counted.steps) == ((2, 1, 0), 1)


@pytest.mark.parametrize("optimizer", [None, nn.Linear(2, 2), [nn.Parameter(torch.ones(2))]])
def test_what_is_no_optimizer_is_refused_at_the_call(optimizer: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer, got (NoneType|Linear|list)"):
        count_lost_updates(optimizer)


# Gradient scalers


SCALERS = pytest.mark.parametrize(
    "scaler_class", [torch.amp.GradScaler, mezzo.torch.GradScaler], ids=["torch", "mezzo"]
)


@SCALERS
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_a_step_that_a_scaler_skips_counts_nothing(fused: bool, bad: bool, scaler_class: Any) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 0.01]))
    optimizer = torch.optim.SGD([weight], lr=1e-9, fused=fused)
    scaler = scaler_class("cpu", init_scale=2.0)
    with count_lost_updates(optimizer) as counted:
        for wrong in (False, bad):
            optimizer.zero_grad()
            scaler.scale((weight * (torch.inf if wrong else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    # 1e-9 is less than half of float32's step at 1.0, and not at 0.01.
    made = 1 if bad else 2
    assert counts(counted) == (2 * made, made, 0)
    assert counted.steps == made
