"""Checkpoints that a prepared run refuses, and that nothing has changed then."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mezzo.torch
from mezzo.errors import PreparationError

from .runs import (
    SETTINGS,
    Pair,
    differing,
    net,
    run,
    same,
    tensors,
    train,
)

# What is refused


def _refused(pair: Pair, call: Callable[[], Any], kind: type[Exception], match: str) -> None:
    """Check that a call raises this and changes nothing."""
    before, saved = tensors(*pair), copy.deepcopy(pair[1].state_dict())
    parameters = [id(one) for one in pair[0].parameters()]
    with pytest.raises(kind, match=match):
        call()
    assert [id(one) for one in pair[0].parameters()] == parameters
    assert differing(tensors(*pair), before) == []
    assert same(pair[1].state_dict(), saved)


def _with(saved: dict[str, Any], part: str, number: int, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(saved)
    changed["mezzo"][part][number] = value
    return changed


@pytest.mark.parametrize("setting", ["masters", "kahan", "none-stochastic"])
def test_masters_of_another_shape_are_refused(setting: str) -> None:
    pair = run(**SETTINGS[setting])
    train(*pair, 2)
    part = {"masters": "masters", "kahan": "compensation"}.get(setting, "low")
    wrong = _with(pair[1].state_dict(), part, 4, torch.ones(3, 5))
    match = rf"{part} of shape \(3, 5\) for parameter 4, which has shape \(3, 12\).*Nothing was loaded"
    _refused(pair, lambda: pair[1].load_state_dict(wrong), PreparationError, match)


def test_masters_for_parameters_that_do_not_exist_are_refused() -> None:
    pair = run()
    wrong = _with(pair[1].state_dict(), "masters", 9, torch.ones(3))
    match = r"for parameter 9, which does not exist"
    _refused(pair, lambda: pair[1].load_state_dict(wrong), PreparationError, match)


def test_a_checkpoint_with_another_number_of_parameters_is_refused() -> None:
    pair, model = run(), nn.Sequential(nn.Linear(6, 12))
    other = mezzo.torch.prepare(model, torch.optim.AdamW(model.parameters()))
    saved = other[1].state_dict()
    _refused(pair, lambda: pair[1].load_state_dict(saved), ValueError, "size of optimizer's group|parameter")


def test_a_refused_checkpoint_is_not_kept_in_memory() -> None:
    pair = run()
    train(*pair, 1)
    made = [copy.deepcopy(pair[1].state_dict())]
    made[0]["param_groups"][0]["params"] = [0, 1, 2]
    reference = weakref.ref(made[0]["mezzo"]["masters"][0])
    _refused(pair, lambda: pair[1].load_state_dict(made[0]), ValueError, "size of optimizer's group")
    made.clear()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_masters_of_another_format_are_refused(version: Any) -> None:
    pair = run()
    saved = copy.deepcopy(pair[1].state_dict())
    saved["mezzo"]["version"] = version
    match = rf"masters of format {version!r}, and this version of mezzo reads 1.*delete the key 'mezzo'"
    _refused(pair, lambda: pair[1].load_state_dict(saved), PreparationError, match)


@pytest.mark.parametrize("value", ["text", [1], 3])
def test_something_else_under_our_key_is_refused(value: Any) -> None:
    pair = run()
    saved = {**copy.deepcopy(pair[1].state_dict()), "mezzo": value}
    match = f"masters of format {type(value).__name__!r}"
    _refused(pair, lambda: pair[1].load_state_dict(saved), PreparationError, match)


@pytest.mark.parametrize("broken", [{"masters": {0: "text"}}, {"masters": None}, {"rounds": "many"}, {"low": [1]}])
def test_damaged_masters_are_refused(broken: dict[str, Any]) -> None:
    pair = run()
    saved = copy.deepcopy(pair[1].state_dict())
    saved["mezzo"].update(broken)
    _refused(pair, lambda: pair[1].load_state_dict(saved), PreparationError, "state dict has")


def test_a_checkpoint_without_our_key_is_loaded_as_pytorch_does() -> None:
    pair = run()
    train(*pair, 2)
    saved = copy.deepcopy(pair[1].state_dict())
    del saved["mezzo"]
    before = mezzo.torch.float32_state_dict(pair[0])
    pair[1].load_state_dict(saved)
    assert differing(mezzo.torch.float32_state_dict(pair[0]), before) == []


@pytest.mark.parametrize("first", [nn.LayerNorm, nn.Linear])
@pytest.mark.parametrize("setting", SETTINGS)
def test_assigning_tensors_is_refused(setting: str, first: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(first(6, 6) if first is nn.Linear else first(6), nn.Linear(6, 3))
    pair = mezzo.torch.prepare(model, torch.optim.AdamW(model.parameters()), **SETTINGS[setting])
    train(*pair, 1)
    values = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    match = r"load_state_dict\(assign=True\) would replace the parameters.*Load without assign, or call"
    _refused(pair, lambda: model.load_state_dict(values, assign=True), PreparationError, match)


def test_assigning_to_a_part_is_refused() -> None:
    pair = run()
    values = {name: torch.zeros_like(each) for name, each in pair[0][3].state_dict().items()}
    _refused(pair, lambda: pair[0][3].load_state_dict(values, assign=True), PreparationError, "assign=True")


def test_a_weight_of_another_shape_leaves_masters_alone() -> None:
    pair = run()
    train(*pair, 1)
    before = mezzo.torch.float32_state_dict(pair[0])
    with pytest.raises(RuntimeError, match=r"size mismatch for 3\.weight"):
        pair[0].load_state_dict({**net(0).state_dict(), **before, "3.weight": torch.ones(3, 11)})
    assert differing(mezzo.torch.float32_state_dict(pair[0]), before) == []
