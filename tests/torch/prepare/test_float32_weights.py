"""Float32 weights that are gone are told of, and those of modules that were replaced do not stand in the way."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from mezzo.torch import GradScaler, autocast, float32_state_dict, memory_report, prepare, unprepare


def pair() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    return prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_weights_whose_masters_are_gone_with_the_optimizer_are_told_of() -> None:
    model, optimizer = pair()
    exact = float32_state_dict(model)
    del optimizer
    gc.collect()
    with pytest.warns(
        UserWarning, match="float32_state_dict: 4 parameters come rounded, since their float32 masters are"
    ):
        rounded = float32_state_dict(model)
    assert rounded["0.weight"].dtype is torch.float32
    assert torch.equal(rounded["0.weight"], exact["0.weight"].bfloat16().float())


def test_weights_of_a_copy_without_its_optimizer_are_told_of() -> None:
    model, optimizer = pair()
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="4 parameters come rounded"):
        float32_state_dict(nn.Sequential(twin))
    float32_state_dict(model)
    assert optimizer.param_groups


def test_of_a_model_that_never_had_masters_nothing_is_told() -> None:
    model = prepare(nn.Linear(4, 4))
    assert float32_state_dict(model)["weight"].dtype is torch.float32
    unprepare(model)


def test_a_head_that_was_replaced_does_not_stand_in_the_way() -> None:
    model, optimizer = pair()
    old = model[2]
    model[2] = nn.Linear(6, 5)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert "2.weight" not in memory_report(model, optimizer).stored
    unprepare(model, optimizer)
    assert {one.dtype for one in (*model.parameters(), *old.parameters())} == {torch.float32}
    assert {type(one) for group in optimizer.param_groups for one in group["params"]} == {nn.Parameter}


@pytest.mark.parametrize("name", ["2.weight", "head"])
def test_a_scaler_names_low_parameters_as_the_model_does(name: str) -> None:
    model, optimizer = pair()
    scaler = GradScaler("cpu", init_scale=2.0)
    if name == "head":
        scaler.name_parameters({"head": model[2].weight})
    with autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(3, 4)).sum()
    scaler.scale(loss).backward()
    assert model[2].weight.grad is not None
    model[2].weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert [each.name for each in scaler.nonfinite(optimizer)] == [name]


def test_a_report_of_a_model_in_ddp_is_that_of_the_model() -> None:
    model, optimizer = pair()
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    assert memory_report(wrapped, optimizer) == memory_report(model, optimizer)


def test_a_parameter_that_is_kept_here_takes_the_master_of_a_checkpoint() -> None:
    model, optimizer = pair()
    exact = float32_state_dict(model)
    torch.manual_seed(0)
    kept = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    kept, theirs = prepare(kept, torch.optim.SGD(kept.parameters(), lr=0.1), keep="2")
    nn.init.zeros_(kept[2].weight)
    kept.load_state_dict(model.state_dict())
    assert not torch.equal(kept[2].weight, exact["2.weight"])
    theirs.load_state_dict(optimizer.state_dict())
    assert kept[2].weight.dtype is torch.float32
    assert torch.equal(kept[2].weight, exact["2.weight"])
