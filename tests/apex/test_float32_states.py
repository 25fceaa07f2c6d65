"""State dicts are float32 at each level: the masters where there are some, and alive."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.apex.amp._amp_state import master_params
from mezzo.apex.amp.float32_states import give_float32, put_float32_states
from mezzo.torch import float32_state_dict
from mezzo.torch.masters.params import masters_in

from .cast_nets import FULL, HALF, LOWS, adam, initialize, mlp, net, sgd, train_step


def dtypes(state: dict[str, Any]) -> set[torch.dtype]:
    return {one.dtype for one in state.values() if one.is_floating_point()}


@pytest.mark.parametrize("dtype", LOWS)
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_state_dicts_of_a_model_and_of_its_parts_are_float32(level: str, dtype: torch.dtype) -> None:
    model = net()
    names = list(model.state_dict())
    initialize(model, sgd(model), level, dtype=dtype)
    state = model.state_dict()
    assert list(state) == names
    assert dtypes(state) == {FULL}
    assert (state["count"].dtype, state["phase"].dtype) == (torch.int64, torch.complex64)
    assert dtypes(model.conv.state_dict()) == dtypes(model.instance.state_dict()) == {FULL}
    # As DistributedDataParallel has it.
    assert list(nn.ModuleDict({"module": model}).state_dict()) == [f"module.{name}" for name in names]
    assert dtypes(nn.ModuleDict({"module": model}).state_dict()) == {FULL}
    assert list(model.state_dict(prefix="a.")) == [f"a.{name}" for name in names]


def test_a_model_that_is_not_cast_keeps_its_state_dict() -> None:
    model = net()
    initialize(model, sgd(model), "O1")
    assert model.state_dict()["wide"].dtype is torch.float64
    initialize(model, level="O2", cast_model_type=False)
    assert not any(one._state_dict_hooks for one in model.modules())


@pytest.mark.parametrize("dtype", LOWS)
def test_nothing_is_rounded_where_there_are_masters(dtype: torch.dtype) -> None:
    model, twin = mlp(), mlp()
    optimizer = sgd(model)
    initialize(model, optimizer, dtype=dtype)
    for name, one in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], one)
        assert not torch.equal(one, one.to(dtype).float())


@pytest.mark.parametrize("optimized", [True, False])
def test_without_masters_the_values_are_the_low_ones(optimized: bool) -> None:
    model = mlp()
    # Adam's steps are in float32 then, with masters that have no values between steps.
    optimizers = [adam(model)] if optimized else []
    initialize(model, optimizers, "O3")
    assert torch.equal(model.state_dict()["0.weight"], model[0].weight.float())


def test_with_keep_vars_the_entries_are_the_parameters() -> None:
    model = net()
    optimizer = sgd(model)
    initialize(model, optimizer)
    state = model.state_dict(keep_vars=True)
    assert state["conv.weight"] is model.conv.weight
    assert state["wide"] is model.wide
    assert dtypes(float32_state_dict(model)) == {FULL}


def test_a_model_may_have_a_state_of_its_own_that_is_no_tensor() -> None:
    class WithState(nn.Linear):
        def get_extra_state(self) -> dict[str, Any]:
            return {"half": torch.ones(1, dtype=HALF)}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.loaded = state

    model = nn.Sequential(WithState(2, 2))
    initialize(model, sgd(model))
    state = model.state_dict()
    assert state["0._extra_state"]["half"].dtype is HALF
    model.load_state_dict(state)
    assert model[0].loaded["half"].dtype is HALF


def test_hooks_of_the_user_and_later_calls_stay_apart() -> None:
    model, seen = nn.Linear(2, 2), []
    model.register_state_dict_post_hook(lambda *args: seen.append(args[1]["weight"].dtype))
    initialize(model)
    model.register_state_dict_post_hook(lambda *args: seen.append(args[1]["weight"].dtype))
    put_float32_states(model)
    model.state_dict()
    assert seen == [HALF, FULL]
    assert list(model._state_dict_hooks.values()).count(give_float32) == 1


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("dtype", LOWS)
def test_checkpoints_go_to_float32_models_and_back(level: str, dtype: torch.dtype) -> None:
    model, other, again = mlp(1), mlp(2), mlp(3)
    optimizer, last = sgd(model), sgd(again)
    initialize(model, optimizer, dtype=dtype)
    initialize(other, level=level)
    initialize(again, last, dtype=dtype)
    train_step(model, optimizer)
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(one, old) for one, old in zip(other.parameters(), master_params(optimizer), strict=True))
    again.load_state_dict(other.state_dict())
    for one, old in zip(master_params(last), master_params(optimizer), strict=True):
        assert torch.equal(one, old)
    for one, old in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, old)
        assert one.dtype is dtype


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("dtype", LOWS)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(dtype: torch.dtype, level: str, first: str) -> None:
    model, again = mlp(1), mlp(2)
    optimizer, its_own = adam(model, eps=1e-4), adam(again, eps=1e-4)
    initialize(model, optimizer, level, dtype=dtype)
    for step in range(3):
        train_step(model, optimizer, step)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = [train_step(model, optimizer, step) for step in range(3, 6)]
    initialize(again, its_own, level, dtype=dtype)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    parts: dict[str, Any] = {"model": again, "optimizer": its_own}
    for name in (first, *(set(parts) - {first})):
        parts[name].load_state_dict(saved[name])
    for step, one in enumerate(expected, 3):
        assert torch.equal(train_step(again, its_own, step), one)


@pytest.mark.parametrize("dtype", LOWS)
def test_small_moments_survive_the_order_of_apex(dtype: torch.dtype) -> None:
    """Apex cast the loaded state to float16 before there were masters: 2e-12 became 0."""
    model, again = mlp(), mlp()
    optimizer, its_own = adam(model), adam(again)
    initialize(model, optimizer, dtype=dtype)
    train_step(model, optimizer)
    for state in optimizer.state.values():
        state["exp_avg_sq"].fill_(2e-12)
    initialize(again, its_own, dtype=dtype)
    again.load_state_dict(model.state_dict())
    its_own.load_state_dict(optimizer.state_dict())
    assert len(its_own.state) == 4
    for state in its_own.state.values():
        assert torch.equal(state["exp_avg_sq"], torch.full_like(state["exp_avg_sq"], 2e-12))


@pytest.mark.parametrize("dtype", LOWS)
def test_weights_that_are_loaded_after_a_step_are_what_the_next_one_starts_from(dtype: torch.dtype) -> None:
    model, other = mlp(1), mlp(2)
    optimizer = sgd(model, lr=1e-4)
    initialize(model, optimizer, dtype=dtype)
    train_step(model, optimizer)
    model.load_state_dict(other.state_dict())
    for one, new in zip(master_params(optimizer), other.parameters(), strict=True):
        assert torch.equal(one, new)
    train_step(model, optimizer)
    for one, new in zip(master_params(optimizer), other.parameters(), strict=True):
        # A step of 1e-4 times gradients that are below 1.
        torch.testing.assert_close(one.detach(), new.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_who_holds_the_entries_sees_later_steps(level: str) -> None:
    model = mlp()
    optimizer = sgd(model)
    initialize(model, optimizer, level)
    held = model.state_dict()
    old = {name: one.clone() for name, one in held.items()}
    train_step(model, optimizer)
    for name, one in model.state_dict().items():
        assert torch.equal(held[name], one)
        assert not torch.equal(old[name], one)
        assert type(one) is Tensor
        assert not one.requires_grad


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_what_is_written_to_the_entries_reaches_the_model(level: str) -> None:
    model, other = mlp(1), mlp(2)
    optimizer = sgd(model)
    initialize(model, optimizer, level)
    x = torch.rand(3, 4)
    for name, one in model.state_dict().items():
        one.copy_(other.state_dict()[name])
    # 11 bits in float16, and sums of 8.
    torch.testing.assert_close(model(x), other(x), atol=5e-3, rtol=5e-3)
    state = model.state_dict()
    assert all(torch.equal(state[name], one) for name, one in other.state_dict().items())
    train_step(model, optimizer)
    assert not torch.equal(state["0.weight"], other[0].weight)


def test_a_write_to_the_low_weights_is_seen() -> None:
    model = mlp()
    optimizer = sgd(model)
    initialize(model, optimizer)
    model[0].bias.data.fill_(0.25)
    assert torch.equal(model.state_dict()["0.bias"], torch.full((8,), 0.25))


def test_loading_what_a_model_has_costs_nothing() -> None:
    model, twin = mlp(), mlp()
    optimizer = sgd(model)
    initialize(model, optimizer)
    model.load_state_dict(model.state_dict())
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(one, old) for one, old in zip(master_params(optimizer), twin.parameters(), strict=True))


def test_once_the_optimizer_is_gone_the_low_weights_are_what_is_left() -> None:
    model = mlp()
    initialize(model, sgd(model))
    assert torch.equal(model.state_dict()["0.weight"], model[0].weight.float())


def test_an_average_of_weights_follows_the_masters() -> None:
    model = mlp()
    optimizer = sgd(model, lr=1e-3)
    initialize(model, optimizer)
    average = {name: one.clone() for name, one in model.state_dict().items()}
    start = {name: one.clone() for name, one in average.items()}
    for step in range(5):
        train_step(model, optimizer, step)
        for name, one in model.state_dict().items():
            average[name].lerp_(one, 0.01)
    assert all(bool((average[name] != one).any()) for name, one in start.items())


def test_a_frozen_parameter_of_no_optimizer_is_given_as_it_is_stored() -> None:
    model, twin = mlp(), mlp()
    optimizer = sgd(model[0])
    initialize(model, optimizer)
    assert torch.equal(model.state_dict()["0.weight"], twin[0].weight)
    assert torch.equal(model.state_dict()["2.weight"], model[2].weight.float())
    assert model.state_dict()["2.weight"].dtype is FULL


def test_a_copy_alone_has_a_float32_state_dict_of_its_own_weights() -> None:
    model = mlp()
    optimizer = sgd(model)
    initialize(model, optimizer)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    state = twin.state_dict()
    assert dtypes(state) == {FULL}
    assert not bool(state["0.weight"].any())
    assert bool(model.state_dict()["0.weight"].all())


def test_tied_weights_are_one_master_under_both_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    optimizer = sgd(model)
    initialize(model, optimizer)
    state = model.state_dict()
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr() == masters_in(optimizer)[0].data_ptr()
