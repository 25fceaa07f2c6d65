"""State dicts, pickles and copies: a run goes on from one as if it had not stopped, in a scaler of either class."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from mezzo import MezzoError, ScalerProtocolError, ScalingError
from mezzo.torch import GradScaler

from .runs import BUSY, CLASSES, INF, NAN, Script, assert_equal, each_class, make_scaler

UNEVEN = {"init_scale": 1000.0, "growth_factor": 3.0, "backoff_factor": 0.7, "growth_interval": 4}
NUMBERS = {"busy": BUSY, "uneven": UNEVEN}
SCRIPT = {"optimizer": "adam", "steps": 100}
EMPTY = "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
MID_ITERATION = (
    "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after scaler.update()."
)


def through_file(value: Any, *, weights_only: bool = True) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def used_scaler(kind: str | type = GradScaler, **numbers: Any) -> Any:
    """Make a scaler that has taken three good steps from 1024 with growth after two: 2048, tracker 1."""
    scaler = make_scaler(kind, **{"init_scale": 1024.0, "growth_interval": 2, **numbers})
    for _ in range(3):
        take_step(scaler)
    return scaler


def take_step(scaler: Any, factor: float = 1.0) -> float:
    """Take one step of SGD with learning rate 1 from weight 0; return the weight afterwards."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight[0].item()


def snapshot(scaler: Any) -> dict[str, Any]:
    return scaler.state_dict()


@pytest.mark.parametrize(("first", "second"), [("mezzo", "torch"), ("torch", "mezzo"), ("mezzo", "mezzo")])
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())
@pytest.mark.parametrize("loop", ["for-loop", "fused"])
@pytest.mark.parametrize("at", [1, 65])
def test_either_class_goes_on_from_the_state_of_the_other(
    first: str, second: str, numbers: dict[str, Any], loop: str, at: int
) -> None:
    script = Script(**SCRIPT, loop=loop, numbers=numbers)

    def change(number: int, scaler: Any) -> Any:
        if number != at:
            return scaler
        following = make_scaler(second)
        following.load_state_dict(through_file(scaler.state_dict()))
        return following

    assert_equal(script.run(first, change), script.run("torch"))


def test_a_state_that_changes_class_at_every_step() -> None:
    script = Script(**SCRIPT, numbers=UNEVEN)
    order = list(CLASSES.values())

    def change(number: int, scaler: Any) -> Any:
        following = make_scaler(order[number % 2])
        following.load_state_dict(scaler.state_dict())
        return following

    assert_equal(script.run("mezzo", change), script.run("torch"))


def test_the_state_dict_is_the_one_of_pytorch() -> None:
    for numbers in NUMBERS.values():
        scripts = [Script(**SCRIPT, numbers=numbers) for _ in CLASSES]
        states: dict[str, list[dict[str, Any]]] = {kind: [] for kind in CLASSES}

        def keep(kind: str, scaler: Any, states: dict[str, list[dict[str, Any]]] = states) -> Any:
            states[kind].append(scaler.state_dict())
            return scaler

        for script, kind in zip(scripts, CLASSES, strict=True):
            script.run(kind, lambda number, scaler, kind=kind: keep(kind, scaler))
        assert states["mezzo"] == states["torch"]
        assert [type(value) for value in states["mezzo"][50].values()] == [float, float, float, int, int]


@pytest.mark.parametrize("source", CLASSES)
@pytest.mark.parametrize("target", CLASSES)
@pytest.mark.parametrize("in_use", [False, True], ids=["before the first scale", "after"])
def test_loading_sets_everything_that_is_in_the_state(source: str, target: str, in_use: bool) -> None:
    state = used_scaler(source, growth_factor=4.0, backoff_factor=0.25).state_dict()
    scaler = used_scaler(target) if in_use else make_scaler(target)
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4096.0, 1)
    take_step(scaler)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (16384.0, 0)
    take_step(scaler, INF)
    assert scaler.get_scale() == 4096.0


def test_loading_writes_into_the_tensors_that_are_there() -> None:
    # Whoever holds the scale tensor, such as a compiled function, goes on seeing the scale.
    scaler = used_scaler()
    scale, tracker = scaler._scale, scaler._growth_tracker
    scaler.load_state_dict(used_scaler(init_scale=16.0).state_dict())
    assert scaler._scale is scale
    assert scaler._growth_tracker is tracker
    assert (scale.item(), tracker.item()) == (32.0, 1)


COPIES = {
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": lambda scaler: through_file(scaler, weights_only=False),
}
each_copy = pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES.keys())


@each_copy
@each_class
@pytest.mark.parametrize("at", [0, 1, 37])
def test_a_copy_goes_on_where_the_scaler_was(make_copy: Any, scaler_class: type, at: int) -> None:
    script = Script(**SCRIPT, numbers=UNEVEN)

    def change(number: int, scaler: Any) -> Any:
        return make_copy(scaler) if number == at else scaler

    assert_equal(script.run(scaler_class, change), script.run("torch"))


@pytest.mark.parametrize("name", ["pickle", "deepcopy", "torch.save"])
def test_a_copy_is_apart_from_the_scaler(name: str) -> None:
    scaler = used_scaler()
    other = COPIES[name](scaler)
    assert type(other) is GradScaler
    take_step(other, INF)
    assert (other.get_scale(), scaler.get_scale()) == (1024.0, 2048.0)
    take_step(scaler)
    assert (other.get_scale(), scaler.get_scale()) == (1024.0, 4096.0)


@pytest.mark.parametrize("name", ["pickle", "deepcopy", "torch.save"])
def test_a_copy_keeps_the_floor_and_the_ceiling(name: str) -> None:
    scaler = make_scaler("mezzo", init_scale=4.0, growth_interval=1, min_scale=1.0, max_scale=8.0)
    other = COPIES[name](scaler)
    scales = []
    for factor in (1.0, 1.0, 1.0, INF, INF, INF, INF, INF):
        take_step(other, factor)
        scales.append(other.get_scale())
    assert scales == [8.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0]


@each_class
@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("name", ["pickle", "deepcopy"])
def test_pickling_within_an_iteration_is_refused(scaler_class: type, call: str, name: str) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), scaler_class("cpu")
    scaler.scale(weight.sum()).backward()
    getattr(scaler, call)(optimizer)
    with pytest.raises(AssertionError) as caught:
        COPIES[name](scaler)
    assert str(caught.value).startswith(MID_ITERATION)
    if scaler_class is GradScaler:
        assert isinstance(caught.value, ScalerProtocolError)
    scaler.update()
    assert COPIES[name](scaler).get_scale() == 2.0**16


@each_class
@pytest.mark.parametrize("in_use", [False, True], ids=["before the first scale", "after"])
def test_an_empty_state_is_refused(scaler_class: type, in_use: bool) -> None:
    scaler = used_scaler(scaler_class) if in_use else make_scaler(scaler_class)
    before = snapshot(scaler)
    with pytest.raises(RuntimeError) as caught:
        scaler.load_state_dict({})
    assert str(caught.value).startswith(EMPTY)
    if scaler_class is GradScaler:
        assert isinstance(caught.value, MezzoError)
    assert snapshot(scaler) == before


@pytest.mark.parametrize("missing", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"])
@pytest.mark.parametrize("in_use", [False, True], ids=["before the first scale", "after"])
def test_a_state_without_one_of_its_keys_is_refused_whole(missing: str, in_use: bool) -> None:
    scaler = used_scaler() if in_use else make_scaler("mezzo")
    before = snapshot(scaler)
    state = used_scaler(init_scale=64.0, growth_factor=8.0, backoff_factor=0.125, growth_interval=7).state_dict()
    del state[missing]
    with pytest.raises(KeyError, match=missing):
        scaler.load_state_dict(state)
    assert snapshot(scaler) == before


WRONG = {
    "a scale that collapsed": {"scale": 0.0},
    "a negative scale": {"scale": -2.0},
    "an infinite scale": {"scale": INF},
    "a scale that is NaN": {"scale": NAN},
    "a scale whose inverse is infinite": {"scale": 1e-40},
    "a scale that is no number": {"scale": "high"},
    "a factor that does not grow": {"growth_factor": 0.5},
    "a factor that does not back off": {"backoff_factor": 1.5},
    "an interval of nothing": {"growth_interval": 0},
    "a negative tracker": {"_growth_tracker": -1},
    "a tracker that is no number": {"_growth_tracker": None},
}


@pytest.mark.parametrize("entry", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("in_use", [False, True], ids=["before the first scale", "after"])
def test_a_state_that_cannot_be_gone_on_from_is_refused_whole(entry: dict[str, Any], in_use: bool) -> None:
    scaler = used_scaler() if in_use else make_scaler("mezzo")
    before = snapshot(scaler)
    good = used_scaler(init_scale=64.0, growth_factor=8.0, backoff_factor=0.125, growth_interval=7).state_dict()
    with pytest.raises(ScalingError):
        scaler.load_state_dict({**good, **entry})
    assert snapshot(scaler) == before
    take_step(scaler, INF)
    assert scaler.get_scale() == before["scale"] * before["backoff_factor"]


def test_the_refusal_of_a_collapsed_scale_says_what_to_do() -> None:
    scaler = make_scaler("mezzo")
    state = {**scaler.state_dict(), "scale": 0.0}
    with pytest.raises(
        ScalingError,
        match=r"has scale 0\.0, .* has collapsed, or is no number. Set state_dict\['scale'\] to one such as",
    ):
        scaler.load_state_dict(state)


def test_keys_that_nobody_knows_are_left_alone() -> None:
    scaler = make_scaler("mezzo")
    scaler.load_state_dict({**used_scaler("torch").state_dict(), "later": 1})
    assert scaler.state_dict() == used_scaler("torch").state_dict()


@each_class
def test_a_disabled_scaler_has_no_state_and_takes_any(scaler_class: type) -> None:
    scaler = make_scaler(scaler_class, enabled=False)
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    scaler.load_state_dict(used_scaler("torch").state_dict())
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0


@each_copy
@each_class
def test_a_copy_of_a_disabled_scaler_is_disabled(make_copy: Any, scaler_class: type) -> None:
    other = make_copy(make_scaler(scaler_class, enabled=False))
    assert not other.is_enabled()
    assert take_step(other) == -1.0
    assert other.state_dict() == {}
