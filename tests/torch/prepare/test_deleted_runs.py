"""A prepared run that is deleted is freed, whatever its last step did."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import mezzo.torch
from mezzo.torch.masters.params import Master, master_of, masters_in

from .runs import LOW, SETTINGS, differing, net, run, same, tensors, train


def _references(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[weakref.ref[Any]]:
    held = [one for group in optimizer.param_groups for one in group["params"]]
    found = [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, held)]
    found += [weakref.ref(one) for one in model.parameters()]
    found += [weakref.ref(one.owner) for one in held if isinstance(one, Master)]
    return found


@pytest.fixture(scope="module", autouse=True)
def _what_was_there_before_is_not_looked_at() -> None:
    """Let collections walk only what is made here: by now a process that runs many files holds a million objects."""
    gc.collect()
    gc.freeze()


def _alive(references: list[weakref.ref[Any]]) -> list[str]:
    gc.collect()
    return [type(one()).__name__ for one in references if one() is not None]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_deleted_run_is_freed(setting: str, steps: int) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, steps)
    references = _references(model, optimizer)
    del model, optimizer
    assert _alive(references) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_deleted_copy_is_freed(setting: str) -> None:
    pair = run(**SETTINGS[setting])
    copied = pickle.loads(pickle.dumps(copy.deepcopy(pair)))
    train(*copied, 1)
    references = _references(*copied)
    del copied
    assert _alive(references) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_masters_of_a_deleted_optimizer_are_freed_while_the_model_lives(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, 2)
    kept = {id(one) for one in model.parameters()}
    references = [weakref.ref(optimizer), *(weakref.ref(one) for one in masters_in(optimizer))]
    del optimizer
    assert _alive(references) == []
    assert {id(one) for one in model.parameters()} == kept
    assert [master_of(one) for one in model.parameters()] == [None] * 6
    with mezzo.torch.autocast("cpu", dtype=LOW):
        model(torch.ones(2, 6)).sum().backward()


class _FailsAfterItsClosure(torch.optim.SGD):
    """Raises in the midst of its step, when the closure has been called."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        msg = "in the midst"
        raise RuntimeError(msg)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_whose_last_step_raised_is_freed(setting: str) -> None:
    model = net()
    optimizer = _FailsAfterItsClosure(model.parameters(), lr=0.1)
    mezzo.torch.prepare(model, optimizer, **SETTINGS[setting])
    with pytest.raises(RuntimeError, match="in the midst"):
        train(model, optimizer, 1)
    references = _references(model, optimizer)
    del model, optimizer
    assert _alive(references) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_whose_closure_raised_is_freed_and_goes_on(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])

    def closure() -> float:
        msg = "no data"
        raise RuntimeError(msg)

    train(model, optimizer, 1)
    before = tensors(model, optimizer)
    with pytest.raises(RuntimeError, match="no data"):
        optimizer.step(closure)
    assert [key for key in differing(tensors(model, optimizer), before) if key.startswith(("model", "grad"))] == []
    train(model, optimizer, 1)
    references = _references(model, optimizer)
    with pytest.raises(RuntimeError, match="no data"):
        optimizer.step(closure)
    del model, optimizer
    assert _alive(references) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_step_that_raised_leaves_the_run_as_if_it_had_not_been_tried(setting: str) -> None:
    model, optimizer = run(optimizer="sgd", **SETTINGS[setting])
    train(model, optimizer, 1)
    twin = copy.deepcopy((model, optimizer))

    def closure() -> float:
        msg = "no data"
        raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="no data"):
        optimizer.step(closure)
    assert same(optimizer.state_dict(), twin[1].state_dict())
    assert train(model, optimizer, 2, first=1) == train(*twin, 2, first=1)
    assert differing(tensors(model, optimizer), tensors(*twin)) == []
