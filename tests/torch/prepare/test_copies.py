"""Copies of a prepared model and its optimizer: by `copy`, `pickle` and `torch.save`, in this process and in a new one."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mezzo.torch
from mezzo.torch.masters.copies import owner_of
from mezzo.torch.masters.params import master_of, masters_in

from .runs import LOW, SETTINGS, Pair, differing, is_prepared, run, same, tensors, train


def _through_torch(pair: Pair) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def _in_a_dict(pair: Pair) -> Any:
    made = copy.deepcopy({"optimizer": pair[1], "model": pair[0]})
    return made["model"], made["optimizer"]


def _in_an_object(pair: Pair) -> Any:
    made = copy.deepcopy(SimpleNamespace(optimizer=pair[1], trainer=[pair[0]]))
    return made.trainer[0], made.optimizer


WAYS: dict[str, Callable[[Pair], Any]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy-of-a-dict": _in_a_dict,
    "deepcopy-of-an-object": _in_an_object,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "pickle-protocol-2": lambda pair: pickle.loads(pickle.dumps(pair, protocol=2)),
    "torch": _through_torch,
}


COMBINED = [
    *(("deepcopy", setting, "adamw") for setting in SETTINGS),
    *(("torch", setting, "adamw-fused") for setting in SETTINGS),
    *((way, setting, "sgd") for way in WAYS for setting in ("masters", "kahan", "none-stochastic")),
]
"""Every way, every setting and every optimizer, but not each with each."""


@pytest.mark.parametrize(("way", "setting", "optimizer"), COMBINED)
def test_a_copy_trains_to_the_same_bits_as_the_original(way: str, setting: str, optimizer: str) -> None:
    pair = run(optimizer=optimizer, **SETTINGS[setting])
    train(*pair, 3)
    before = tensors(*pair)
    copied = WAYS[way](pair)
    assert differing(tensors(*pair), before) == []  # the original is not touched
    losses = train(*copied, 3, first=3)
    assert losses == train(*pair, 3, first=3)
    assert differing(tensors(*copied), tensors(*pair)) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_a_copy_does_not_touch_the_original(setting: str) -> None:
    pair = run(**SETTINGS[setting])
    train(*pair, 2)
    before, saved = tensors(*pair), copy.deepcopy(pair[1].state_dict())
    train(*copy.deepcopy(pair), 2, first=2)
    assert differing(tensors(*pair), before) == []
    assert differing(pair[1].state_dict(), saved) == []


@pytest.mark.parametrize(("way", "setting"), [(way, setting) for way, setting, _ in COMBINED[8:]])
def test_the_optimizer_of_a_copy_saves_its_masters_before_any_step(way: str, setting: str) -> None:
    pair = run(**SETTINGS[setting])
    train(*pair, 3)
    copied = WAYS[way](pair)
    got, expected = copied[1].state_dict(), pair[1].state_dict()
    assert ("mezzo" in got) is is_prepared(pair[1])
    assert differing(got.get("mezzo", {}), expected.get("mezzo", {})) == []
    assert same(got, expected)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("way", ["deepcopy", "torch"])
def test_a_copy_has_the_float32_weights_of_the_original(way: str, setting: str) -> None:
    pair = run(**SETTINGS[setting])
    train(*pair, 3)
    copied = WAYS[way](pair)
    assert differing(mezzo.torch.float32_state_dict(copied[0]), mezzo.torch.float32_state_dict(pair[0])) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_copy_of_a_copy_of_a_copy_trains_as_the_original(setting: str) -> None:
    pair = run(**SETTINGS[setting])
    train(*pair, 2)
    copied = _through_torch(copy.deepcopy(_through_torch(pair)))
    assert train(*copied, 2, first=2) == train(*pair, 2, first=2)
    assert differing(tensors(*copied), tensors(*pair)) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_copy_before_the_first_step_trains_as_the_original(setting: str) -> None:
    pair = run(**SETTINGS[setting])
    copied = copy.deepcopy(pair)
    assert train(*copied, 3) == train(*pair, 3)
    assert differing(tensors(*copied), tensors(*pair)) == []


def test_a_copy_links_to_the_copied_model_alone() -> None:
    model, optimizer = run()
    copied_model, copied = copy.deepcopy((model, optimizer))
    mine = {id(one) for one in copied_model.parameters()}
    assert all(id(one.model_param) in mine for one in masters_in(copied))
    assert all(master_of(one.model_param) is one for one in [*masters_in(optimizer), *masters_in(copied)])
    assert owner_of(copied) is masters_in(copied)[0].owner
    assert owner_of(copied) is not owner_of(optimizer)


@pytest.mark.parametrize("way", ["deepcopy", "torch"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_copy_of_a_write_that_no_step_has_seen_yet_has_it(setting: str, way: str) -> None:
    pair = run(**SETTINGS[setting])
    train(*pair, 2)
    with torch.no_grad():
        pair[0][0].weight.fill_(0.5)
    copied = WAYS[way](pair)
    assert train(*copied, 1, first=2) == train(*pair, 1, first=2)
    assert differing(tensors(*copied), tensors(*pair)) == []


@pytest.mark.parametrize("setting", ["kahan", "masters-stochastic"])
def test_a_copy_between_the_loading_of_optimizer_and_model_goes_on_like_the_original(setting: str) -> None:
    first = run(**SETTINGS[setting])
    train(*first, 3)
    weights, state = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
    pair = run(weights=1, **SETTINGS[setting])
    pair[1].load_state_dict(state)
    copied = copy.deepcopy(pair)
    copied[0].load_state_dict(weights)
    assert train(*copied, 2, first=3) == train(*first, 2, first=3)
    assert differing(tensors(*copied), tensors(*first)) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_that_is_sent_to_another_process_keeps_its_link(setting: str) -> None:
    pair = run(**SETTINGS[setting])
    train(*pair, 1)
    twin = copy.deepcopy(pair)
    # What torch.multiprocessing does with arguments; it warns of hooks on tensors, and warnings are errors here.
    sent = pickle.loads(ForkingPickler.dumps(pair))
    assert train(*sent, 1, first=1) == train(*twin, 1, first=1)
    pickle.loads(ForkingPickler.dumps(pair[0]))


# Fresh processes

_LOADS = """
import copy
import sys
import torch

runs, batches = torch.load(sys.argv[1], weights_only=False)
ends = {}
for name, (model, optimizer) in runs.items():
    saved = copy.deepcopy(optimizer.state_dict())
    for batch in batches:
        optimizer.zero_grad()
        for part in batch:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(part).float().square().mean()
            loss.backward()
        optimizer.step()
    ends[name] = saved, {**model.state_dict()}, optimizer.state_dict()
torch.save(ends, sys.argv[2])
"""


def test_a_process_that_imports_torch_alone_goes_on_with_saved_runs(tmp_path: Path) -> None:
    runs = {setting: run(**options) for setting, options in SETTINGS.items()}
    for pair in runs.values():
        train(*pair, 3)
    batches = [[torch.randn(8, 6) for _ in range(2)] for _ in range(2)]
    torch.save((runs, batches), tmp_path / "runs.pt")
    before = {setting: copy.deepcopy(optimizer.state_dict()) for setting, (_, optimizer) in runs.items()}
    command = [sys.executable, "-W", "error", "-c", _LOADS, str(tmp_path / "runs.pt"), str(tmp_path / "ends.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    ends = torch.load(tmp_path / "ends.pt", weights_only=True)
    for setting, (model, optimizer) in runs.items():
        for each in batches:
            optimizer.zero_grad()
            for part in each:
                with torch.autocast("cpu", dtype=LOW):
                    loss = model(part).float().square().mean()
                loss.backward()
            optimizer.step()
        saved, weights, state = ends[setting]
        assert same(saved, before[setting])
        assert differing(weights, dict(model.state_dict())) == []
        assert same(state, optimizer.state_dict())


# Each alone


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("way", [copy.deepcopy, _through_torch])
def test_a_copy_of_the_model_alone_has_its_weights_and_no_masters(way: Any, setting: str) -> None:
    pair = run(**SETTINGS[setting])
    train(*pair, 2)
    before = tensors(*pair)
    model = way(pair[0])
    assert differing(dict(model.state_dict()), dict(pair[0].state_dict())) == []
    assert [master_of(one) for one in model.parameters()] == [None] * 6
    with mezzo.torch.autocast("cpu", dtype=LOW):
        model(torch.ones(2, 6)).sum().backward()
    assert {one.grad.dtype for one in model[0].parameters() if one.grad is not None} == {LOW}
    assert differing(tensors(*pair), before) == []


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("way", [copy.deepcopy, _through_torch])
def test_a_copy_of_the_optimizer_alone_moves_weights_of_its_own(way: Any, setting: str) -> None:
    pair = run(**SETTINGS[setting])
    train(*pair, 2)
    before = tensors(*pair)
    optimizer = way(pair[1])
    assert same(optimizer.state_dict(), pair[1].state_dict())
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.ones_like(one)
    optimizer.step()
    assert not same(optimizer.state_dict(), pair[1].state_dict())
    assert differing(tensors(*pair), before) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_copied_model_can_be_prepared_with_an_optimizer_of_its_own(setting: str) -> None:
    pair = run(**SETTINGS[setting])
    train(*pair, 2)
    model = copy.deepcopy(pair[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    made, same_optimizer = mezzo.torch.prepare(model, optimizer, **SETTINGS[setting])
    assert made is model
    assert same_optimizer is optimizer
    assert is_prepared(optimizer) is is_prepared(pair[1])
    before = tensors(*pair)
    train(model, optimizer, 2)
    assert differing(tensors(*pair), before) == []
    assert not same(dict(model.state_dict()), dict(pair[0].state_dict()))


def test_the_master_of_a_copied_model_starts_at_the_low_weight() -> None:
    pair = run()
    train(*pair, 2)
    model = copy.deepcopy(pair[0])
    _, optimizer = mezzo.torch.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(torch.equal(one, one.model_param.float()) for one in masters_in(optimizer))


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_averaged_model_follows_a_prepared_one(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    averaged = torch.optim.swa_utils.AveragedModel(model)
    expected = [one.detach().float().clone() for one in model.parameters()]
    for number in range(3):
        train(model, optimizer, 1, first=number)
        averaged.update_parameters(model)
    # The first update copies the weights; of the mean of bfloat16 weights, one rounding per update is lost: 3 * 2**-8.
    history = [one.detach().float() for one in averaged.module.parameters()]
    now = [one.detach().float() for one in model.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(history, now, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(history, expected, strict=True))
    assert [one.dtype for one in averaged.module.parameters()] == [one.dtype for one in model.parameters()]
    assert [master_of(one) for one in averaged.module.parameters()] == [None] * 6


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_shallow_copy_of_the_optimizer_steps_the_same_model(setting: str) -> None:
    pair = run(**SETTINGS[setting])
    twin = copy.deepcopy(pair)
    train(*pair, 1)
    train(*twin, 1)
    shallow = copy.copy(pair[1])
    assert type(shallow) is type(pair[1])
    assert train(pair[0], shallow, 2, first=1) == train(*twin, 2, first=1)
    assert differing(dict(pair[0].state_dict()), dict(twin[0].state_dict())) == []


def test_a_scheduler_is_copied_along() -> None:
    model, optimizer = run()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, 1)
    scheduler.step()
    first = (model, optimizer, scheduler)
    for way in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        copied = way(first)
        assert copied[2].optimizer is copied[1]
        twin = copy.deepcopy(first)
        for each in (copied, twin):
            train(*each[:2], 1, first=1)
            each[2].step()
        assert copied[1].param_groups[0]["lr"] == 0.01 * 0.25
        assert differing(tensors(*copied[:2]), tensors(*twin[:2])) == []


# Optimizers made by hand


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_made_from_master_params_keeps_the_model_in_step(fused: bool) -> None:
    model, optimizer = run()
    train(model, optimizer, 2)
    by_hand = torch.optim.AdamW(mezzo.torch.master_params(optimizer), lr=0.01, fused=fused)
    twin = copy.deepcopy((model, optimizer))
    other = torch.optim.AdamW(mezzo.torch.master_params(twin[1]), lr=0.01, fused=fused)
    other.load_state_dict(by_hand.state_dict())
    assert train(model, by_hand, 3) == train(twin[0], other, 3)
    masters = masters_in(by_hand)
    assert len(masters) == 4
    for one in masters:
        assert torch.equal(one.to(LOW), one.model_param)
        assert not torch.equal(one, one.model_param.float())
    assert differing(tensors(model, by_hand), tensors(twin[0], other)) == []


def test_an_optimizer_made_by_hand_saves_its_masters_from_its_first_step() -> None:
    model, optimizer = run()
    by_hand = torch.optim.SGD(mezzo.torch.master_params(optimizer), lr=0.1)
    train(model, by_hand, 1)
    saved = by_hand.state_dict()["mezzo"]["masters"]
    assert {number: tuple(each.shape) for number, each in saved.items()} == {0: (12, 6), 1: (12,), 4: (3, 12), 5: (3,)}
