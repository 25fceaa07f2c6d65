"""Checkpoints of one kind of run in another: unprepared and prepared, with masters and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mezzo.torch

from .runs import (
    LOW,
    OPTIMIZERS,
    SETTINGS,
    differing,
    load,
    net,
    read_back,
    run,
    same,
    train,
    unprepared,
)

# Unprepared and prepared


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("order", ["model optimizer", "optimizer model"])
def test_a_float32_checkpoint_gives_masters_its_exact_values(order: str, optimizer: str) -> None:
    plain = unprepared(optimizer)
    train(*plain, 3)
    pair = run(weights=1, optimizer=optimizer)
    load(pair, read_back(plain), order)
    assert differing(mezzo.torch.float32_state_dict(pair[0]), dict(plain[0].state_dict())) == []
    held = list(mezzo.torch.master_params(pair[1]))
    assert all(torch.equal(a, b) for a, b in zip(held, plain[0].parameters(), strict=True))
    assert same(pair[1].state_dict()["state"], plain[1].state_dict()["state"])
    dtypes = {one.dtype for state in pair[1].state.values() for one in state.values() if isinstance(one, Tensor)}
    assert dtypes == {torch.float32}
    # With one backward pass per step a prepared run has the bits of one in autocast.
    assert train(*pair, 3, first=3, backwards=1) == train(*plain, 3, first=3, backwards=1)
    assert differing(mezzo.torch.float32_state_dict(pair[0]), dict(plain[0].state_dict())) == []


@pytest.mark.parametrize("order", ["model optimizer", "optimizer model"])
def test_a_float32_checkpoint_gives_a_compensated_run_16_bits_of_its_values(order: str) -> None:
    plain = unprepared()
    train(*plain, 3)
    pair = run(weights=1, masters="kahan")
    load(pair, read_back(plain), order)
    got = mezzo.torch.float32_state_dict(pair[0])
    for name, value in plain[0].state_dict().items():
        # bfloat16 has 8 bits: a weight and its rounding error have 16 or more together.
        torch.testing.assert_close(got[name], value, rtol=2**-16, atol=0)
    expected = run(weights=1)
    load(expected, read_back(plain), order)
    assert differing(dict(pair[0].state_dict()), dict(expected[0].state_dict())) == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_moments_of_a_float32_checkpoint_stay_float32_where_steps_are(setting: str) -> None:
    plain = unprepared()
    train(*plain, 2)
    pair = run(weights=1, **SETTINGS[setting])
    load(pair, read_back(plain))
    moments = [state["exp_avg"].dtype for state in pair[1].state.values()]
    low = LOW if setting == "none" else torch.float32
    assert moments == [low, low, torch.float32, torch.float32, low, low]
    train(*pair, 1)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("order", ["model optimizer", "optimizer model"])
def test_an_unprepared_run_loads_the_checkpoint_of_a_prepared_one(order: str, setting: str) -> None:
    pair = run(**SETTINGS[setting])
    train(*pair, 3)
    plain = unprepared(weights=1)
    load(plain, read_back(pair), order)
    assert "mezzo" not in plain[1].state_dict()
    low = {name: each.float() for name, each in pair[0].state_dict().items()}
    assert differing(dict(plain[0].state_dict()), low) == []
    plain[0].load_state_dict(mezzo.torch.float32_state_dict(pair[0]))
    assert differing(dict(plain[0].state_dict()), mezzo.torch.float32_state_dict(pair[0])) == []
    train(*plain, 1)


def test_an_unprepared_run_goes_on_bit_for_bit_from_float32_weights() -> None:
    pair = run()
    train(*pair, 3, backwards=1)
    plain = unprepared(weights=1)
    plain[0].load_state_dict(mezzo.torch.float32_state_dict(pair[0]))
    plain[1].load_state_dict(read_back(pair)["optimizer"])
    assert train(*plain, 3, first=3, backwards=1) == train(*pair, 3, first=3, backwards=1)
    assert differing(dict(plain[0].state_dict()), mezzo.torch.float32_state_dict(pair[0])) == []


def test_float32_state_dict_of_a_model_without_optimizer_is_what_it_stores() -> None:
    model = mezzo.torch.prepare(net())
    got = mezzo.torch.float32_state_dict(model)
    assert list(got) == list(model.state_dict())
    assert {each.dtype for each in got.values()} == {torch.float32}
    assert same(got, {name: each.float() for name, each in model.state_dict().items()})
    plain = net()
    assert same(mezzo.torch.float32_state_dict(plain), dict(plain.state_dict()))


def test_float32_state_dict_gives_copies_that_later_steps_leave_alone() -> None:
    pair = run()
    got = mezzo.torch.float32_state_dict(pair[0])
    kept = {name: each.clone() for name, each in got.items() if name[0] in "03"}
    train(*pair, 2)
    assert differing({name: got[name] for name in kept}, kept) == []
    assert not any(each.requires_grad for each in got.values())


# From one kind of run to another


@pytest.mark.parametrize("into", ["masters", "masters-stochastic", "kahan", "kahan-stochastic", "none-stochastic"])
@pytest.mark.parametrize("out_of", ["masters", "masters-stochastic", "kahan", "kahan-stochastic", "none-stochastic"])
@pytest.mark.parametrize("order", ["model optimizer", "optimizer model"])
def test_every_kind_of_run_loads_every_other(order: str, out_of: str, into: str) -> None:
    first, second = run(**SETTINGS[out_of]), run(weights=1, **SETTINGS[into])
    train(*first, 3)
    load(second, read_back(first), order)
    wide, got = mezzo.torch.float32_state_dict(first[0]), mezzo.torch.float32_state_dict(second[0])
    # Float32 masters hold all; with a compensation 16 bits, without one 8 are kept, and all that rounding gives is low.
    rtol = {"masters": 0.0, "masters-stochastic": 0.0, "none-stochastic": 2**-7}.get(into, 2**-15)
    for name, value in wide.items():
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=0)
    assert all(one.dtype is each.dtype for one, each in zip(first[0].parameters(), second[0].parameters(), strict=True))
    train(*second, 2, first=3)
