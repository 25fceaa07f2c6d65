"""Numbers are checked, set, saved and loaded, between this scaler, the package's own, and PyTorch's."""

from __future__ import annotations

import copy
import math
import pickle
from importlib.util import find_spec
from typing import Any

import pytest
import tensorplay as tp

from mezzo.errors import ScalerProtocolError, ScalingError
from mezzo.tensorplay import GradScaler

from .runs import iterate, make, scaler_of

KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]


def used(scaler: Any) -> Any:
    weight, optimizer = make("SGD")
    for factor in (1.0, math.inf, 1.0, 1.0):
        iterate(scaler, optimizer, weight, factor)
    return scaler


def go_on(scaler: Any) -> list[tuple[float, int]]:
    weight, optimizer = make("SGD")
    reached = []
    for factor in (1.0, 1.0, math.inf, 1.0):
        iterate(scaler, optimizer, weight, factor)
        reached.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return reached


def other_kinds() -> dict[str, Any]:
    made: dict[str, Any] = {"own": GradScaler, "package": tp.amp.GradScaler}
    if find_spec("torch"):
        import torch

        import mezzo.torch

        made |= {"torch": torch.amp.GradScaler, "mezzo.torch": mezzo.torch.GradScaler}
    return made


@pytest.mark.parametrize("other", other_kinds().values(), ids=other_kinds())
def test_states_go_from_one_scaler_to_another(other: Any) -> None:
    saved = used(scaler_of(init_scale=1024.0, growth_interval=3)).state_dict()
    assert saved == {
        "scale": 512.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 2,
    }
    assert list(saved) == KEYS
    through = other("cpu")
    through.load_state_dict(saved)
    back = scaler_of(init_scale=8.0)
    back.load_state_dict(through.state_dict())
    assert back.state_dict() == saved
    assert go_on(back) == [(1024.0, 0), (1024.0, 1), (512.0, 0), (512.0, 1)]


def test_a_state_goes_into_a_scaler_that_has_run() -> None:
    scaler = used(scaler_of())
    scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0, "_growth_tracker": 5})
    assert scaler.get_scale() == 64.0
    assert scaler.scale(tp.ones(())).item() == 64.0
    assert scaler._get_scale_async().item() == 64.0
    assert scaler._get_growth_tracker() == 5


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("fresh", [True, False])
def test_copies_go_on_as_the_original(copied: Any, fresh: bool) -> None:
    def start() -> GradScaler:
        scaler = scaler_of(init_scale=1024.0, growth_interval=3, min_scale=512.0, max_scale=1024.0, max_nan_backoffs=2)
        return scaler if fresh else used(scaler)

    twin = copied(start())
    assert twin.state_dict() == start().state_dict()
    assert go_on(twin) == go_on(start())


def test_a_copy_is_on_its_own() -> None:
    scaler = used(scaler_of())
    twin = copy.copy(scaler)
    weight, optimizer = make("SGD")
    iterate(twin, optimizer, weight)
    assert scaler.steps_taken(optimizer) == 0
    assert twin.steps_taken(optimizer) == 1
    twin.set_growth_factor(3.0)
    assert scaler.get_growth_factor() == 2.0


def test_a_scaler_of_ones_own_keeps_its_attributes_in_a_pickle() -> None:
    scaler = used(scaler_of())
    scaler.note = "mine"  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(scaler)).note == "mine"


def test_no_pickle_in_the_midst_of_an_iteration() -> None:
    weight, optimizer = make("SGD")
    scaler = scaler_of()
    scaler.scale((weight * weight).sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(ScalerProtocolError, match=r"may only be pickled at the beginning .* Call update\(\) first"):
        pickle.dumps(scaler)
    scaler.update()
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 2.0**16


def test_a_disabled_scaler_saves_nothing_and_loads_nothing() -> None:
    scaler = GradScaler("cpu", enabled=False)
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"scale": "nonsense"})
    assert pickle.loads(pickle.dumps(scaler)).is_enabled() is False


def test_an_empty_state_is_refused() -> None:
    with pytest.raises(ScalerProtocolError, match=r"The source state dict is empty.*Leave load_state_dict out"):
        scaler_of().load_state_dict({})


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"scale": 0.0}, ScalingError, "has scale 0.0, with which no gradient survives"),
        ({"scale": math.inf}, ScalingError, "has scale inf"),
        ({"scale": "x"}, ScalingError, "has scale 'x'"),
        ({"growth_factor": 0.5}, ScalingError, r"The growth factor must be > 1\.0"),
        ({"backoff_factor": 2.0}, ScalingError, r"The backoff factor must be < 1\.0"),
        ({"growth_interval": 0}, ScalingError, "growth_interval must be a whole number"),
        ({"_growth_tracker": -1}, ScalingError, "has _growth_tracker -1"),
        ({"_growth_tracker": 1.5}, ScalingError, "has _growth_tracker 1.5"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused_in_full(change: dict[str, Any], error: Any, text: str) -> None:
    scaler = used(scaler_of())
    before = scaler.state_dict()
    state = {**scaler_of(init_scale=4.0, growth_interval=7).state_dict(), **change}
    with pytest.raises(error, match=text):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("key", KEYS)
def test_a_state_that_lacks_an_entry_is_refused(key: str) -> None:
    state = scaler_of().state_dict()
    del state[key]
    with pytest.raises(KeyError, match=key):
        scaler_of().load_state_dict(state)


def test_a_state_is_a_mapping() -> None:
    with pytest.raises(ScalingError, match=r"takes what state_dict\(\) gave, a dict; got 3"):
        scaler_of().load_state_dict(3)  # type: ignore[arg-type]
