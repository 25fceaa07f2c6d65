"""Checkpoints of prepared runs: what is saved, and that a run goes on from it bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo.torch
from mezzo.torch.masters.params import masters_in

from .runs import (
    LOW,
    SETTINGS,
    Pair,
    batch,
    differing,
    is_prepared,
    load,
    net,
    read_back,
    run,
    same,
    tensors,
    train,
)


def _name_of(model: nn.Module, parameter: Tensor) -> str:
    return next(name for name, one in model.named_parameters() if one is parameter)


# A run goes on


@pytest.mark.parametrize("started", [False, True], ids=["before-the-first-step", "after-steps"])
@pytest.mark.parametrize("order", ["model optimizer", "optimizer model", "optimizer model optimizer model"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_checkpoint_restores_a_run_bit_for_bit(setting: str, order: str, started: bool) -> None:
    first, second = run(**SETTINGS[setting]), run(weights=1, **SETTINGS[setting])
    train(*first, 3)
    train(*second, 2 * started, first=50)
    load(second, read_back(first), order)
    assert same(second[1].state_dict(), first[1].state_dict())
    assert differing(mezzo.torch.float32_state_dict(second[0]), mezzo.torch.float32_state_dict(first[0])) == []
    assert train(*second, 3, first=3) == train(*first, 3, first=3)
    first[1].zero_grad()
    second[1].zero_grad()
    assert differing(tensors(*second), tensors(*first)) == []


@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_checkpoint_restores_a_run_of_any_optimizer(setting: str, optimizer: str) -> None:
    first = run(optimizer=optimizer, **SETTINGS[setting])
    second = run(weights=1, optimizer=optimizer, **SETTINGS[setting])
    train(*first, 3)
    load(second, read_back(first), "optimizer model")
    assert train(*second, 3, first=3) == train(*first, 3, first=3)
    assert differing(tensors(*second), tensors(*first)) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_look_at_the_state_between_the_two_loads_changes_nothing(setting: str) -> None:
    first, second = run(**SETTINGS[setting]), run(weights=1, **SETTINGS[setting])
    train(*first, 3)
    saved = read_back(first)
    for order in ("optimizer", "model", "model", "optimizer", "model"):
        load(second, saved, order)
        second[1].state_dict()
        mezzo.torch.float32_state_dict(second[0])
    assert train(*second, 2, first=3) == train(*first, 2, first=3)
    assert differing(tensors(*second), tensors(*first)) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_loading_the_optimizer_alone_refreshes_the_model(setting: str) -> None:
    first, second = run(**SETTINGS[setting]), run(weights=1, **SETTINGS[setting])
    train(*first, 3)
    load(second, read_back(first), "optimizer")
    refreshed = is_prepared(first[1])
    assert same(second[0][0].weight, first[0][0].weight) is refreshed
    assert not same(second[0][1].weight, first[0][1].weight)  # of what has no master nothing is there


@pytest.mark.parametrize("setting", SETTINGS)
def test_loading_the_model_alone_updates_the_masters(setting: str) -> None:
    first, second = run(**SETTINGS[setting]), run(weights=1, **SETTINGS[setting])
    train(*first, 3)
    train(*second, 2)
    second[0].load_state_dict(copy.deepcopy(first[0].state_dict()))
    got, ulp = mezzo.torch.float32_state_dict(second[0]), 2**-7
    for name, low in first[0].state_dict().items():
        if low.dtype is torch.float32:
            assert torch.equal(got[name], low)
        # A master that is within rounding of the new value by chance keeps its own; the others take it over.
        torch.testing.assert_close(got[name], low.float(), rtol=ulp, atol=0)
        assert (got[name] == low).float().mean() > 0.9
    for one in masters_in(second[1]):
        if one.owner.settings.keeps_masters:
            assert torch.equal(one, got[_name_of(second[0], one.model_param)])


@pytest.mark.parametrize("setting", [name for name in SETTINGS if "kahan" not in name])
def test_the_models_own_values_cost_the_masters_nothing(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, 3)
    before = copy.deepcopy(optimizer.state_dict())
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert same(optimizer.state_dict(), before)


@pytest.mark.parametrize("how", ["no_grad", "assigned"])
@pytest.mark.parametrize("setting", ["masters", "masters-stochastic", "kahan", "none-stochastic"])
def test_a_state_dict_right_after_a_write_to_a_weight_has_it(setting: str, how: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, 2)
    before = mezzo.torch.float32_state_dict(model)
    weight = model[0].weight
    with torch.no_grad():
        if how == "no_grad":
            weight[0].fill_(0.75)
        else:
            weight.data = torch.cat([torch.full((1, 6), 0.75, dtype=LOW), weight.detach()[1:]])
    saved, number = optimizer.state_dict()["mezzo"], 0
    wide = saved["masters"].get(number)
    if wide is None:
        wide = saved["low"][number].float() + saved["compensation"].get(number, torch.zeros(()))
    assert torch.equal(wide[0], torch.full((6,), 0.75))
    # A compensation is of no use without the weight that it was made for, and a write to a part is one to the whole.
    rtol = 2**-8 if setting == "kahan" else 0.0
    torch.testing.assert_close(wide[1:], before["0.weight"][1:], rtol=rtol, atol=0)
    assert torch.equal(mezzo.torch.float32_state_dict(model)["0.weight"], wide)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_next_step_starts_from_what_was_written(setting: str) -> None:
    model, optimizer = run(optimizer="sgd", **SETTINGS[setting])
    train(model, optimizer, 1)
    nn.init.constant_(model[0].weight, 8.0)
    train(model, optimizer, 1, first=1)
    # A step moves a weight by less than 1 here.
    assert (model[0].weight - 8).abs().max() < 1


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_checkpoint_has_plain_tensors_and_numbers_alone(setting: str) -> None:
    pair = run(**SETTINGS[setting])
    train(*pair, 1)
    saved = pair[1].state_dict()
    assert set(saved) == {"state", "param_groups"} | ({"mezzo"} if is_prepared(pair[1]) else set())
    masters = saved.get("mezzo", {"version": 1, "rounds": 0})
    assert masters["version"] == 1
    parts = [each for name in ("masters", "low", "compensation") for each in masters.get(name, {}).values()]
    assert {type(each) for each in parts} <= {Tensor}
    assert not any(each.requires_grad for each in parts)
    rounds = SETTINGS[setting].get("rounding") == "stochastic"
    assert (masters["rounds"] > 0) is rounds


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_that_loads_its_own_state_goes_on_as_before(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, 2)
    before = tensors(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())  # these tensors are those of the run
    assert differing(tensors(model, optimizer), before) == []


@pytest.mark.parametrize("order", ["model optimizer", "optimizer model"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_group_that_was_added_later_comes_back_with_its_masters_and_moments(setting: str, order: str) -> None:
    def made() -> Pair:
        model = net()
        optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01)
        mezzo.torch.prepare(model, optimizer, **SETTINGS[setting])
        optimizer.add_param_group({"params": [*model[1].parameters(), *model[3].parameters()]})
        return model, optimizer

    first, second = made(), made()
    train(*first, 3)
    load(second, read_back(first), order)
    assert same(second[1].state_dict(), first[1].state_dict())
    first[0].zero_grad()
    assert train(*second, 2, first=3) == train(*first, 2, first=3)
    assert differing(tensors(*second), tensors(*first)) == []


# Parts of models, and models that are parts


@pytest.mark.parametrize("setting", ["masters", "kahan"])
def test_a_submodule_takes_float32_values_by_its_ownload(setting: str) -> None:
    pair, other = run(**SETTINGS[setting]), net(5)
    train(*pair, 2)
    before = mezzo.torch.float32_state_dict(pair[0])
    pair[0][3].load_state_dict(other[3].state_dict())
    got = mezzo.torch.float32_state_dict(pair[0])
    assert differing(got, before) == ["3.weight", "3.bias"]
    rtol = 0.0 if setting == "masters" else 2**-16
    torch.testing.assert_close(got["3.weight"], other[3].weight.detach(), rtol=rtol, atol=0)


@pytest.mark.parametrize("setting", ["masters", "kahan"])
def test_a_wrapped_model_takes_float32_values_by_its_prefix(setting: str) -> None:
    pair, other = run(**SETTINGS[setting]), nn.Sequential(net(5))
    train(*pair, 2)
    wrapped = nn.Sequential(pair[0])
    wrapped.load_state_dict(other.state_dict())
    got, expected = mezzo.torch.float32_state_dict(wrapped), dict(other.state_dict())
    assert list(got) == list(expected)
    rtol = 0.0 if setting == "masters" else 2**-16
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=0)


def test_a_load_that_is_not_strict_takes_what_is_there() -> None:
    pair, other = run(), net(5)
    train(*pair, 2)
    before = mezzo.torch.float32_state_dict(pair[0])
    some = {"0.weight": other[0].weight.detach(), "elsewhere": torch.ones(1)}
    missing, unexpected = pair[0].load_state_dict(some, strict=False)
    assert len(missing) == 5
    assert unexpected == ["elsewhere"]
    got = mezzo.torch.float32_state_dict(pair[0])
    assert differing(got, before) == ["0.weight"]
    assert torch.equal(got["0.weight"], other[0].weight)


def test_a_float64_checkpoint_is_rounded_to_float32() -> None:
    pair, other = run(), net(5).double()
    pair[0].load_state_dict(other.state_dict())
    expected = {name: each.float() for name, each in other.state_dict().items()}
    assert differing(mezzo.torch.float32_state_dict(pair[0]), expected) == []


def test_a_float16_checkpoint_gives_masters_its_exact_values() -> None:
    pair, other = run(), net(5).half()
    pair[0].load_state_dict(other.state_dict())
    expected = {name: each.float() for name, each in other.state_dict().items()}
    assert differing(mezzo.torch.float32_state_dict(pair[0]), expected) == []


def test_tied_weights_are_saved_and_restored_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    def made(seed: int) -> Pair:
        torch.manual_seed(seed)
        model = Tied()
        return mezzo.torch.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    first, second = made(0), made(1)
    train(*first, 2)
    load(second, read_back(first))
    assert second[0].first.weight is second[0].second.weight
    assert train(*second, 2, first=2) == train(*first, 2, first=2)
    plain = Tied()
    plain.load_state_dict(mezzo.torch.float32_state_dict(first[0]))
    second[0].load_state_dict(plain.state_dict())
    assert differing(mezzo.torch.float32_state_dict(second[0]), dict(plain.state_dict())) == []


def test_a_scheduler_and_groups_with_their_own_numbers_come_back() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = net()
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        mezzo.torch.prepare(model, optimizer)
        return model, optimizer, scheduler

    first, second = made(), made()
    for number in range(2):
        train(first[0], first[1], 1, first=number)
        first[2].step()
    load(second[:2], read_back(first[:2]))
    second[2].load_state_dict(first[2].state_dict())
    assert [group["lr"] for group in second[1].param_groups] == [0.025, 0.05]
    for each in (first, second):
        each[0].load_state_dict(
            {**each[0].state_dict(), **{f"1.{name}": torch.ones(12) for name in ("weight", "bias")}}
        )
    assert train(*first[:2], 2, first=2) == train(*second[:2], 2, first=2)


def test_a_loaded_checkpoint_shares_no_memory_with_the_run() -> None:
    first = run(masters="kahan")
    train(*first, 2)
    second, third = run(masters="kahan"), run()
    saved = read_back(first)
    kept = copy.deepcopy(saved)
    for each in (second, third):
        load(each, saved)
        train(*each, 2)
    # The state is not looked at: PyTorch itself goes on in the tensors that it was given.
    assert same(saved["model"], kept["model"])
    assert same(saved["optimizer"]["mezzo"], kept["optimizer"]["mezzo"])


def test_a_restored_run_computes_what_the_saved_one_did() -> None:
    first = run()
    train(*first, 2)
    second = run(weights=1)
    load(second, read_back(first))
    with torch.no_grad(), mezzo.torch.autocast("cpu", dtype=LOW):
        assert torch.equal(first[0](batch(0)), second[0](batch(0)))


def test_float32_state_dict_has_the_versions_that_modules_look_at() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    expected = model.state_dict()
    got = mezzo.torch.float32_state_dict(mezzo.torch.prepare(model))
    assert type(got) is type(expected)
    assert got._metadata == expected._metadata  # type: ignore[attr-defined]
