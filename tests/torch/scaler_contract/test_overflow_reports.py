"""What an overflow tells by itself: the callback, and the lines in the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from mezzo.torch import GradScaler, NonFinite, Overflow

from .overflowing import INF, NAN, backward, iterate, net

BAD = {"0.weight": [NAN, INF, 1.0, -INF]}
FOUND = (NonFinite("0.weight", 1, 2, 6, "float32"),)
LOGGER = "mezzo.torch.scaler"


def training(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, GradScaler]:
    model = net()
    return model, torch.optim.SGD(model.named_parameters(), lr=0.1), GradScaler("cpu", **options)


def test_the_callback_is_called_in_step_and_for_skipped_steps_alone() -> None:
    seen: list[Overflow] = []
    model, optimizer, scaler = training(init_scale=1024.0, on_overflow=seen.append)
    iterate(scaler, model, optimizer)
    assert seen == []
    backward(scaler, model, BAD)
    scaler.step(optimizer)
    (overflow,) = seen
    assert overflow.optimizer is optimizer
    assert overflow.parameters == FOUND
    assert overflow.scale == 1024.0
    assert overflow.skipped_in_a_row == 1
    scaler.update()
    iterate(scaler, model, optimizer)
    assert len(seen) == 1


def test_the_callback_can_ask_the_scaler() -> None:
    answers: list[Any] = []

    def ask(overflow: Overflow) -> None:
        stepped = scaler.stepped(overflow.optimizer)
        answers.append((stepped, scaler.nonfinite(overflow.optimizer), scaler.skipped_in_a_row(overflow.optimizer)))

    model, optimizer, scaler = training(on_overflow=ask)
    iterate(scaler, model, optimizer, BAD)
    assert answers == [(False, FOUND, 1)]


def test_skips_in_a_row_are_counted_until_a_step_is_made() -> None:
    counts: list[int] = []
    model, optimizer, scaler = training(on_overflow=lambda overflow: counts.append(overflow.skipped_in_a_row))
    for bad in (BAD, BAD, None, BAD, BAD, BAD):
        iterate(scaler, model, optimizer, bad)
    assert counts == [1, 2, 1, 2, 3]
    assert scaler.skipped_in_a_row(optimizer) == 3
    assert scaler.steps_taken(optimizer) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_the_callback_kept_tells_of_its_own_step_later_too(set_to_none: bool) -> None:
    """Read first when the scale has moved, the gradients are gone and another overflow has come."""
    kept: list[Overflow] = []
    model, optimizer, scaler = training(init_scale=1024.0, on_overflow=kept.append)
    iterate(scaler, model, optimizer, BAD)
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(scaler, model, {"2.bias": [NAN]})
    scaler.step(optimizer)
    scaler.update()
    assert [overflow.scale for overflow in kept] == [1024.0, 512.0]
    assert kept[0].parameters == FOUND
    assert kept[1].parameters == (NonFinite("2.bias", 1, 0, 1, "float32"),)


@pytest.mark.parametrize("bad", [INF, NAN], ids=["Inf", "NaN"])
def test_what_pytorchs_clipping_has_made_nan_altogether_is_said_to_be_unknown(bad: float) -> None:
    seen: list[Overflow] = []
    model, optimizer, scaler = training(on_overflow=seen.append)
    for clip in (torch.nn.utils.clip_grad_norm_, scaler.clip_grad_norm_):
        optimizer.zero_grad()
        backward(scaler, model, {"2.weight": [bad]})
        scaler.unscale_(optimizer)
        clip(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert [overflow.known for overflow in seen] == [bad == INF, True]
    text = "2.weight: 1 NaN, 0 Inf" if bad == INF else "clip with the scaler's clip_grad_norm_"
    assert text in seen[0].describe()
    assert seen[1].describe().startswith("2.weight: ")


def test_a_callback_that_raises_is_heard_and_the_step_counts_as_skipped() -> None:
    def complain(overflow: Overflow) -> None:
        raise ArithmeticError(overflow.parameters[0].name)

    model, optimizer, scaler = training(init_scale=1024.0, on_overflow=complain)
    before = [parameter.clone() for parameter in model.parameters()]
    backward(scaler, model, BAD)
    with pytest.raises(ArithmeticError, match=r"0\.weight"):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert not scaler.stepped(optimizer)
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == LOGGER and one.levelno == level]


def test_the_first_skips_are_logged_in_one_line_when_they_end(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, scaler = training(init_scale=1024.0)
    with caplog.at_level(logging.INFO, LOGGER):
        for _ in range(3):
            iterate(scaler, model, optimizer, {"2.bias": [INF]})
        assert lines(caplog, logging.INFO) == []
        iterate(scaler, model, optimizer)
        (line,) = lines(caplog, logging.INFO)
        assert "3" in line
        assert "128" in line
        for bad in ({"2.bias": [INF]}, None, None):
            iterate(scaler, model, optimizer, bad)
    assert lines(caplog, logging.INFO) == [line]
    assert lines(caplog, logging.WARNING) == []


def test_a_run_without_skips_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, scaler = training(growth_interval=2)
    with caplog.at_level(logging.DEBUG, LOGGER):
        for bad in (None, None, None, {"2.bias": [INF]}, None):
            iterate(scaler, model, optimizer, bad)
    # The skip came after a step was made: no calibration.
    assert lines(caplog, logging.INFO) == lines(caplog, logging.WARNING) == []


def test_a_nan_that_outlives_the_backoffs_is_logged_with_names_and_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, scaler = training(init_scale=1024.0, max_nan_backoffs=2)
    scales = []
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(5):
            iterate(scaler, model, optimizer, {"2.weight": [NAN, NAN]})
            scales.append(scaler.get_scale())
    assert scales == [512.0, 256.0, 256.0, 256.0, 256.0]
    (line,) = lines(caplog, logging.WARNING)
    assert "2.weight: 2 NaN" in line
    assert "0.weight" not in line


def test_an_inf_among_the_nans_is_no_case_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, scaler = training(init_scale=1024.0, max_nan_backoffs=2)
    with caplog.at_level(logging.WARNING, LOGGER):
        for values in ([NAN], [NAN], [NAN, INF], [NAN], [NAN]):
            iterate(scaler, model, optimizer, {"2.weight": values})
    assert lines(caplog, logging.WARNING) == []
    assert scaler.get_scale() == 32.0
