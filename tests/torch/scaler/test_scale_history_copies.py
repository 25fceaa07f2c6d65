"""Checkpoints and copies of a scaler know nothing of its history, and a history has checkpoints and copies of its own."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mezzo.errors import OptionError
from mezzo.torch import GradScaler
from mezzo.torch.scaling.scale_history import ScaleHistory

from .runs import INF


def iterate(scaler: GradScaler, *factors: float) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def watched(**options: Any) -> tuple[GradScaler, ScaleHistory]:
    scaler = GradScaler("cpu", init_scale=64.0)
    return scaler, ScaleHistory(scaler, norms=True, **options)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}
each_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


@each_copy
def test_a_copy_of_a_scaler_has_no_history_and_the_scaler_keeps_its_own(copied: Callable[[Any], Any]) -> None:
    # A callback that no pickle can hold is no obstacle.
    scaler, history = watched(callback=lambda tag, value, step: None)
    iterate(scaler, 1.0, INF)
    twin = copied(scaler)
    iterate(twin, INF, INF)
    assert len(history.rows()) == 2
    iterate(scaler, 1.0)
    assert [row.scale for row in history.rows()] == [64.0, 64.0, 32.0]


def test_the_state_of_a_watched_scaler_has_pytorchs_five_entries() -> None:
    scaler, history = watched()
    iterate(scaler, INF)
    state = scaler.state_dict()
    assert list(state) == ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
    iterate(scaler, INF)
    scaler.load_state_dict(state)
    iterate(scaler, 1.0)
    assert [row.scale for row in history.rows()] == [64.0, 32.0, 32.0]


def test_a_run_goes_on_from_a_checkpoint_of_its_history() -> None:
    whole_scaler, whole = watched()
    iterate(whole_scaler, 1.0, INF, 2.0, INF)

    first_scaler, first = watched()
    iterate(first_scaler, 1.0, INF)
    buffer = io.BytesIO()
    torch.save({"scaler": first_scaler.state_dict(), "history": first.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)

    told: list[tuple[str, float, int]] = []
    second_scaler, second = watched(callback=lambda *what: told.append(what), every=1)
    second_scaler.load_state_dict(saved["scaler"])
    second.load_state_dict(saved["history"])
    iterate(second_scaler, 2.0, INF)
    assert second.rows() == whole.rows()
    assert second.as_dict() == {
        "step": [0, 1, 2, 3],
        "scale": [64.0, 64.0, 32.0, 32.0],
        "skipped": [False, True, False, True],
        "norm": [2.0, INF, 4.0, INF],
    }
    assert [step for tag, _, step in told if tag == "amp/scale"] == [2, 3]


def test_loading_takes_the_place_of_what_was_there_and_of_what_was_not_read() -> None:
    scaler, history = watched()
    iterate(scaler, 1.0, 1.0)
    history.load_state_dict({"step": [8], "scale": [2.0], "skipped": [True], "norm": [None], "next_step": 9})
    iterate(scaler, 1.0)
    assert [(row.step, row.norm) for row in history.rows()] == [(8, None), (9, 2.0)]


def test_what_is_no_state_is_refused_and_nothing_lost() -> None:
    scaler, history = watched()
    iterate(scaler, 1.0)
    state = history.state_dict()
    with pytest.raises(KeyError, match="next_step"):
        history.load_state_dict(history.as_dict())
    with pytest.raises(OptionError, match=r"next_step must be a whole number of at least 0\. Got -1\."):
        history.load_state_dict({**state, "next_step": -1})
    with pytest.raises(ValueError, match="shorter"):
        history.load_state_dict({**state, "norm": []})
    assert history.state_dict() == state


@each_copy
def test_a_copy_of_a_history_has_the_rows_and_watches_nothing(copied: Callable[[Any], Any]) -> None:
    scaler, history = watched(callback=lambda tag, value, step: None, keep=3)
    iterate(scaler, 1.0, INF)
    twin = copied(history)
    iterate(scaler, 1.0)
    assert twin.rows() == history.rows()[:2]
    assert repr(twin) == "<ScaleHistory: 2 rows, next step 2>"
    twin.close()
    assert scaler._watched_by == [history]
