"""Section E: scales that collapse, and NaN that is taken for overflow.

E6 is in ``test_scaler_dtypes.py``; rows that PyTorch 2.13 gets right (E2's scales below one, E4, E5, E10) are in
``test_scaler_faults_fixed.py``, outside of this folder.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .amps import Amp
from .training import INF, NAN, iterate, layers, plain, spoiled_iteration, weight

LOGGER = "mezzo.torch.scaler"
# More than float32 has exponents for: from 2**16 to below its smallest number, 2**-149.
ENDLESS = 200


# E1, top 15 no. 3: the scale collapses, and the scaler itself writes -inf and NaN into weights


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("slope", [1.0, 0.0, -0.5])
def test_e1_after_endless_overflows_a_finite_gradient_is_stepped_with(amp: Amp, slope: float, fused: bool) -> None:
    """E1: a slope of one made the weight -inf under a scale of zero, one of zero made it NaN."""
    scaler, w = amp.scaler(), weight(1.0, 2.0)
    optimizer = plain([w], fused=fused)
    iterate(scaler, optimizer, INF, ENDLESS)
    assert w.tolist() == [1.0, 2.0]
    iterate(scaler, optimizer, slope)
    assert w.tolist() == [1.0 - slope, 2.0 - slope]


def test_e1_the_scale_stops_at_its_floor_and_recovers(amp: Amp) -> None:
    """E1: by default the floor is 2**-24; from a scale of zero none ever came back."""
    scaler, optimizer = amp.scaler(growth_interval=1), plain([weight(1.0)])
    iterate(scaler, optimizer, INF, ENDLESS)
    assert scaler.get_scale() == 2.0**-24
    iterate(scaler, optimizer, times=10)
    assert scaler.get_scale() == 2.0**-14


def by_constructor(amp: Amp, scale: float) -> Any:
    return amp.scaler(scale)


def by_update(amp: Amp, scale: float) -> Any:
    scaler = amp.scaler()
    iterate(scaler, plain([weight(1.0)]))
    scaler.update(scale)
    return scaler


def by_checkpoint(amp: Amp, scale: float) -> Any:
    scaler = amp.scaler()
    scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
    return scaler


@pytest.mark.parametrize("scale", [1e-39, 0.0], ids=["1e-39", "0"])
@pytest.mark.parametrize("make", [by_constructor, by_update, by_checkpoint])
def test_e1_no_way_leads_to_a_scale_without_a_finite_inverse(
    amp: Amp, make: Callable[[Amp, float], Any], scale: float
) -> None:
    """E1: 1 / 1e-39 is infinite in float32; such a scale is refused, or no step is made with it."""
    w = weight(1.0)
    try:
        scaler = make(amp, scale)
    except ValueError:
        return  # mezzo's ScalingError
    iterate(scaler, plain([w]), times=2)
    assert w.isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled_by_hand", [False, True])
def test_e1_gradients_that_overflow_when_unscaled_are_not_stepped_with(
    amp: Amp, unscaled_by_hand: bool, fused: bool
) -> None:
    """E1: what is scaled is finite, what is unscaled is not; only the first was looked at."""
    scaler, w = amp.scaler(2.0**-20), weight(2.0**-60)
    optimizer = plain([w], fused=fused)
    scaler.scale((w * 2.0**70 * 2.0**70).sum()).backward()
    assert w.grad is not None
    assert w.grad.item() == 2.0**120
    if unscaled_by_hand:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert w.item() == 2.0**-60
    assert not scaler.stepped(optimizer)


def test_e1_endless_skips_are_an_error_where_a_limit_is_set(amp: Amp) -> None:
    """E1: `max_skipped` says how many skips in a row are too many; the error names the parameters."""
    net = layers(2, 2)
    scaler, optimizer, said = amp.scaler(max_skipped=5), plain(net.parameters()), []
    for _ in range(10):
        try:
            spoiled_iteration(scaler, net, optimizer, {"0.bias": [INF]})
        except RuntimeError as error:
            said.append(str(error))
            break
    assert len(said) == 1
    assert "0.bias" in said[0]
    assert scaler.skipped_in_a_row(optimizer) == 5


# E2: how far the scale may fall is for the user to say


@pytest.mark.parametrize("floor", [1.0, 2.0**-4, 2.0**-30])
def test_e2_the_floor_can_be_chosen(amp: Amp, floor: float) -> None:
    """E2: `min_scale` stops the backing off there, not before and not after."""
    scaler, optimizer = amp.scaler(min_scale=floor), plain([weight(1.0)])
    reached = []
    for _ in range(60):
        iterate(scaler, optimizer, INF)
        reached.append(scaler.get_scale())
    assert reached == [max(2.0 ** (15 - i), floor) for i in range(60)]


def test_e2_a_model_that_needs_a_scale_below_one_trains_on_after_a_burst_of_overflows(amp: Amp) -> None:
    """E2: gradients of 98304 fit float16 only under a scale of one half; under 2**-40 they are lost in it."""
    scaler, w = amp.scaler(1.0, min_scale=2.0**-3), weight(0.0)
    optimizer = plain([w])

    def train(slope: float) -> None:
        optimizer.zero_grad()
        # The gradient passes through float16 on its way back.
        scaler.scale((w.half().float() * slope).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    train(98304.0)
    assert (w.item(), scaler.get_scale()) == (0.0, 0.5)
    train(98304.0)
    assert w.item() == -98304.0
    for _ in range(40):
        train(INF)
    w.detach().zero_()
    train(98304.0)
    assert w.item() == -98304.0


# E3: a NaN is not an overflow


def test_e3_a_run_of_nans_stops_backing_off_and_names_the_parameter(amp: Amp, caplog: pytest.LogCaptureFixture) -> None:
    """E3: a smaller scale cures no NaN: after eight in a row the scale stays, and a warning says whose they are."""
    net = layers(8, 4, 2)
    scaler, optimizer = amp.scaler(), plain(net.parameters())
    before = copy.deepcopy(net.state_dict())
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(ENDLESS):
            spoiled_iteration(scaler, net, optimizer, {"1.weight": [NAN, 1.0, NAN]})
    assert scaler.get_scale() == 2.0 ** (16 - 8)
    warned = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(warned) == 1
    assert "1.weight" in warned[0]
    assert "0.weight" not in warned[0]
    assert [str(found) for found in scaler.nonfinite(optimizer)] == ["1.weight: 2 NaN, 0 Inf of 8 (float32)"]
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_e3_the_report_tells_nan_from_inf_by_parameter(amp: Amp) -> None:
    """E3: which parameters, how many of which kind; nothing once a step was made."""
    net = layers(8, 4, 2)
    scaler, optimizer = amp.scaler(), plain(net.parameters())
    spoiled_iteration(scaler, net, optimizer, {"0.weight": [NAN, INF, NAN, -INF, NAN], "1.bias": [INF]})
    assert [(f.name, f.nan, f.inf, f.numel, f.dtype) for f in scaler.nonfinite(optimizer)] == [
        ("0.weight", 3, 2, 32, "float32"),
        ("1.bias", 0, 1, 2, "float32"),
    ]
    spoiled_iteration(scaler, net, optimizer, {})
    assert scaler.nonfinite(optimizer) == ()


@pytest.mark.parametrize(("allowed", "scale"), [(0, 2.0**16), (3, 2.0**13), (None, 2.0**-24)])
def test_e3_how_many_nans_back_off_can_be_chosen(amp: Amp, allowed: int | None, scale: float) -> None:
    """E3: none at all, some, or all as PyTorch has it, then still down to the floor only."""
    scaler, optimizer = amp.scaler(max_nan_backoffs=allowed), plain([weight(1.0)])
    iterate(scaler, optimizer, NAN, ENDLESS)
    assert scaler.get_scale() == scale


def test_e3_overflows_between_nans_back_off_as_ever(amp: Amp) -> None:
    """E3: only NaN and no Inf, iteration after iteration, is no overflow; both together may be one."""
    scaler, optimizer = amp.scaler(max_nan_backoffs=3), plain([weight(1.0, 1.0)])
    for slope in (NAN, NAN, INF, torch.tensor([NAN, INF]), NAN, NAN, NAN, NAN, NAN, INF, NAN):
        iterate(scaler, optimizer, slope)
    assert scaler.get_scale() == 2.0 ** (16 - 9)


# E4: growth is bounded by more than float32


def test_e4_the_scale_grows_to_a_ceiling(amp: Amp) -> None:
    """E4: PyTorch holds the scale at float32's last finite value; `max_scale` holds it where the user says."""
    scaler, optimizer = amp.scaler(growth_interval=1, max_scale=2.0**24), plain([weight(1.0)])
    iterate(scaler, optimizer, times=20)
    assert scaler.get_scale() == 2.0**24


# E8: the first overflows, which are how the scale is found, look like a model that does not train


def test_e8_the_first_skips_are_explained_once(amp: Amp, caplog: pytest.LogCaptureFixture) -> None:
    """E8: one line when the first steps were skipped while the scale was found, none for later skips."""
    scaler, optimizer = amp.scaler(), plain([weight(1.0)])
    with caplog.at_level(logging.INFO, LOGGER):
        iterate(scaler, optimizer, INF, 3)
        for slope in (1.0, 1.0, INF, 1.0):
            iterate(scaler, optimizer, slope)
    said = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(said) == 1
    assert "3 step" in said[0]
    assert "8192" in said[0]
