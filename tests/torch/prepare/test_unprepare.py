"""Undoing `prepare`: the model and the optimizer are as if they had never been prepared."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo.torch
from mezzo.torch import prepare, unprepare
from mezzo.torch.masters.copies import owner_of
from mezzo.torch.masters.params import master_of, masters_in

from .runs import LOW, OPTIMIZERS, SETTINGS, differing, net, run, same, tensors, train

Optimizer = torch.optim.Optimizer


def _plain(optimizer: str = "adamw") -> tuple[nn.Sequential, Optimizer]:
    model = net()
    return model, OPTIMIZERS[optimizer](model.parameters())


def _hooks(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    """Give all that is on modules and optimizers besides weights: the names of attributes, and every hook."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[path] = {
            name: dict(value) if isinstance(value, OrderedDict) else "" for name, value in vars(module).items()
        }
    for name, one in model.named_parameters():
        found[name] = (id(one), one.dtype, one.grad_dtype, one.requires_grad, len(one._backward_hooks or ()), vars(one))
    for place, each in enumerate(optimizers):
        found[f"optimizer {place}"] = {
            name: dict(value) if isinstance(value, OrderedDict) else "" for name, value in vars(each).items()
        }
        found[f"groups {place}"] = [[id(one) for one in group["params"]] for group in each.param_groups]
        found[f"state {place}"] = sorted(map(id, each.state))
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_training_goes_on_bit_for_bit_as_it_would_in_autocast(optimizer: str, steps: int) -> None:
    model, held = _plain(optimizer)
    twin, other = _plain(optimizer)
    train(model, held, 2, backwards=1)
    prepare(model, held)
    train(model, held, steps, first=2, backwards=1)
    masters = [one.detach().clone() for one in mezzo.torch.master_params(held)]
    unprepare(model, held)
    assert all(torch.equal(one, each) for one, each in zip(model.parameters(), masters, strict=True))
    train(twin, other, 2 + steps, backwards=1)
    assert differing(tensors(model, held), tensors(twin, other)) == []
    assert train(model, held, 3, first=7) == train(twin, other, 3, first=7)
    assert differing(tensors(model, held), tensors(twin, other)) == []


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_hooks_and_attributes_are_gone(setting: str, steps: int) -> None:
    model, optimizer = _plain()
    train(model, optimizer, 1)
    before = _hooks(model, optimizer)
    prepare(model, optimizer, **SETTINGS[setting])
    train(model, optimizer, steps)
    optimizer.zero_grad()
    unprepare(model, optimizer)
    assert differing(_hooks(model, optimizer), before) == []
    assert owner_of(optimizer) is None
    assert masters_in(optimizer) == []
    assert [master_of(one) for one in model.parameters()] == [None] * 6
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_weights_are_those_that_float32_state_dict_gave(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, 3)
    expected = mezzo.torch.float32_state_dict(model)
    unprepare(model, optimizer)
    assert differing(dict(model.state_dict()), expected) == []
    assert {one.dtype for one in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_optimizer_goes_on_with_float32_state(setting: str, optimizer: str) -> None:
    model, held = run(optimizer=optimizer, **SETTINGS[setting])
    train(model, held, 2)
    unprepare(model, held)
    train(model, held, 2)
    assert {id(one) for one in held.state} == {id(one) for one in model.parameters()}
    kinds = {one.dtype for state in held.state.values() for one in state.values() if isinstance(one, Tensor)}
    assert kinds == {torch.float32}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_model_can_be_prepared_again(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, 2)
    unprepare(model, optimizer)
    twin, other = copy.deepcopy((model, optimizer))
    assert prepare(model, optimizer, **SETTINGS[setting]) == (model, optimizer)
    prepare(twin, other, **SETTINGS[setting])
    assert train(model, optimizer, 2) == train(twin, other, 2)
    assert differing(tensors(model, optimizer), tensors(twin, other)) == []


def test_preparing_and_undoing_many_times_costs_no_bits() -> None:
    model, optimizer = _plain()
    twin, other = _plain()
    for number in range(3):
        prepare(model, optimizer)
        train(model, optimizer, 1, first=number, backwards=1)
        unprepare(model, optimizer)
    train(twin, other, 3, backwards=1)
    assert differing(tensors(model, optimizer), tensors(twin, other)) == []


@pytest.mark.parametrize("when", ["prepared", "undone"])
def test_a_gradient_that_is_there_already_counts_in_the_next_step(when: str) -> None:
    (model, optimizer), (twin, other) = _plain(), _plain()
    if when == "undone":
        prepare(model, optimizer)
    for each in (model, twin):
        with mezzo.torch.autocast("cpu", dtype=LOW):
            loss = each(torch.ones(4, 6)).float().square().mean()
        loss.backward()
    if when == "undone":
        unprepare(model, optimizer)
    else:
        prepare(model, optimizer)
    optimizer.step()
    other.step()
    assert differing(mezzo.torch.float32_state_dict(model), dict(twin.state_dict())) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_stay_in_the_dtype_of_the_weights(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, 1)
    expected = {name: one.grad.float() for name, one in model.named_parameters() if one.grad is not None}
    unprepare(model, optimizer)
    got = {name: one.grad for name, one in model.named_parameters()}
    assert differing(got, expected) == []


def test_gradients_are_summed_in_float32_again() -> None:
    model, optimizer = run(grad_dtype=LOW)
    unprepare(model, optimizer)
    twin, other = _plain()
    train(model, optimizer, 2)
    train(twin, other, 2)
    assert {one.grad.dtype for one in model.parameters() if one.grad is not None} == {torch.float32}
    assert differing(tensors(model, optimizer), tensors(twin, other)) == []


@pytest.mark.parametrize("how", ["prepared-for-inference", "prepared-with-masters"])
def test_a_model_without_optimizer_has_the_low_values_in_float32(how: str) -> None:
    model = net()
    low = {name: one.to(LOW).float() for name, one in model.state_dict().items() if name[0] != "1"}
    before = _hooks(model)
    if how == "prepared-for-inference":
        prepare(model)
    else:
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        gc.collect()  # the optimizer and its masters are gone
    gone = pytest.warns(UserWarning, match="4 parameters come rounded, since their float32 masters are gone")
    with gone if how == "prepared-with-masters" else contextlib.nullcontext():
        unprepare(model)
    assert {name: one for name, one in model.named_parameters() if name in low}.keys() == low.keys()
    assert all(torch.equal(dict(model.named_parameters())[name], each) for name, each in low.items())
    assert differing(_hooks(model), before) == []


def test_a_write_that_no_step_has_seen_is_kept() -> None:
    model, optimizer = run()
    train(model, optimizer, 1)
    expected = model[3].weight.detach().clone()
    nn.init.constant_(model[0].weight, 0.3)
    unprepare(model, optimizer)
    assert torch.equal(model[0].weight, torch.full((12, 6), 0.3).to(LOW).float())
    assert torch.equal(model[3].weight.to(LOW), expected)


class _Mixed(nn.Module):
    """Parameters and buffers of several dtypes, one of each shared."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6).double()
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.third.weight = self.second.weight
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("wide", torch.rand(3, dtype=torch.float64))
        self.register_buffer("narrow", torch.rand(3))
        self.register_buffer("count", torch.ones(3, dtype=torch.int64))
        self.register_buffer("temporary", torch.rand(3), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.norm(self.second(self.first(x.to(self.first.weight.dtype)).float())))


def test_dtypes_of_parameters_and_buffers_come_back() -> None:
    model = _Mixed()
    dtypes = {name: one.dtype for name, one in [*model.named_parameters(), *model.named_buffers()]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = _hooks(model, optimizer)
    prepare(model, optimizer, low="**", buffers=True)
    floats = [one for one in [*model.parameters(), *model.buffers()] if one.is_floating_point()]
    assert {one.dtype for one in floats} == {LOW}
    unprepare(model, optimizer)
    assert {name: one.dtype for name, one in [*model.named_parameters(), *model.named_buffers()]} == dtypes
    assert differing(_hooks(model, optimizer), before) == []
    assert model.third.weight is model.second.weight
    assert model.absent is None
    assert "temporary" not in model.state_dict()


def test_a_float64_parameter_comes_back_with_float32_values() -> None:
    model = _Mixed()
    expected = model.first.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer, low="first")
    unprepare(model, optimizer)
    assert torch.equal(model.first.weight, expected.float().double())
    expected = model.second.weight.detach().clone()
    unprepare(*prepare(model, optimizer))
    assert torch.equal(model.second.weight, expected)


def test_buffers_stay_where_modules_find_them() -> None:
    model = _Mixed()
    prepare(model, low="**", buffers=True, keep=nn.modules.batchnorm._BatchNorm)
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.dtype is torch.float32
    assert model.wide.dtype is LOW
    expected = model.wide.double()
    unprepare(model)
    assert torch.equal(model.wide, expected)
    assert model._non_persistent_buffers_set == {"temporary"}


@pytest.mark.parametrize("setting", SETTINGS)
def test_frozen_parameters_stay_frozen(setting: str) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepare(model, optimizer, **SETTINGS[setting])
    frozen = model[0].weight.detach().clone()
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, frozen)
    unprepare(model, optimizer)
    assert [one.requires_grad for one in model.parameters()] == [False, False, True, True, True, True]
    assert all(one.grad is None for one in model[0].parameters())


def test_several_optimizers_are_undone_together() -> None:
    model = net()
    pair = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[3].parameters(), lr=0.01)]
    before = _hooks(model, *pair)
    assert prepare(model, pair) == (model, pair)
    for each in pair:
        train(model, each, 1)
    for each in pair:
        each.state.clear()
        each.zero_grad()
    model.zero_grad()
    unprepare(model, pair)
    assert differing(_hooks(model, *pair), before) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_copy_is_undone_and_the_original_is_not(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, 2)
    twin, other = copy.deepcopy((model, optimizer))
    expected = mezzo.torch.float32_state_dict(model)
    before = tensors(model, optimizer)
    unprepare(twin, other)
    assert differing(dict(twin.state_dict()), expected) == []
    assert differing(tensors(model, optimizer), before) == []
    assert model[0].weight.dtype is LOW
    train(twin, other, 1)
    train(model, optimizer, 1)


def test_hooks_of_the_user_stay() -> None:
    model, optimizer = run()
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("forward"))
    model[0].register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    model[0].weight.register_hook(lambda gradient: calls.append("gradient"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("save"))
    unprepare(model, optimizer)
    train(model, optimizer, 1, backwards=1)
    model.load_state_dict(model.state_dict())
    optimizer.state_dict()
    assert sorted(calls) == ["forward", "gradient", "load", "save"]


def test_a_model_that_goes_from_optimizer_to_optimizer_gathers_no_hooks() -> None:
    model, optimizer = run()
    hooks = len(model[0].weight._backward_hooks)
    for _ in range(3):
        del optimizer
        gc.collect()
        _, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(optimizer.state_dict()["mezzo"]["masters"]) == [0, 1, 4, 5]
    assert len(model[0].weight._backward_hooks) == hooks


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "none"])
def test_state_of_steps_on_low_weights_is_float32_once_there_are_masters(setting: str) -> None:
    model = prepare(net())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 1)
    prepare(model, optimizer, **SETTINGS[setting])
    train(model, optimizer, 1)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    for setting in SETTINGS.values():
        model, rate = net(), torch.tensor(0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
        groups = optimizer.param_groups
        prepare(model, optimizer, **setting)
        assert optimizer.param_groups is groups
        assert groups[0]["lr"] is rate
        unprepare(model, optimizer)
        assert optimizer.param_groups is groups
        assert groups[0]["lr"] is rate


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_masters_are_freed(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, 2)
    masters = [weakref.ref(one) for one in masters_in(optimizer)]
    owners = [weakref.ref(one.owner) for one in masters_in(optimizer)]
    unprepare(model, optimizer)
    gc.collect()
    assert [one() for one in (*masters, *owners) if one() is not None] == []


def test_unprepared_parts_of_an_optimizer_stay_as_they_are() -> None:
    model, other = net(), net(1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
    theirs = [id(one) for one in other.parameters()]
    prepare(model, optimizer)
    unprepare(model, optimizer)
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [*map(id, model.parameters()), *theirs]
    assert same([one.dtype for one in other.parameters()], [torch.float32] * 6)


def test_masters_that_came_by_add_param_group_are_undone_too() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    prepare(model, optimizer)
    optimizer.add_param_group({"params": list(model[3].parameters())})
    train(model, optimizer, 2)
    assert len(masters_in(optimizer)) == 4
    expected = mezzo.torch.float32_state_dict(model)
    unprepare(model, optimizer)
    assert differing(dict(model.state_dict()), expected) == []
    assert [id(one) for group in optimizer.param_groups for one in group["params"]] == [
        *map(id, model[0].parameters()),
        *map(id, model[3].parameters()),
    ]


def test_a_compiled_model_is_undone_through_its_wrapper() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = torch.compile(model, backend="eager")
    before = _hooks(model, optimizer)
    assert prepare(wrapped, optimizer) == (wrapped, optimizer)
    assert model[0].weight.dtype is LOW
    unprepare(wrapped, optimizer)
    assert differing(_hooks(model, optimizer), before) == []
