"""A callback of a scale's history hears of each row once, in batches, as a TensorBoard writer takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mezzo.torch import GradScaler
from mezzo.torch.scaling.scale_history import ScaleHistory

Told = list[tuple[str, float, int]]


class Writer:
    """Has TensorBoard's method, with its names."""

    def __init__(self) -> None:
        self.told: Told = []

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int, walltime: float | None = None, new_style: bool = False
    ) -> None:
        assert (walltime, new_style) == (None, False)
        self.told.append((tag, scalar_value, global_step))


def a_scaler() -> GradScaler:
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=3)
    scaler.scale(torch.ones(()))
    return scaler


def update(scaler: GradScaler, times: int) -> None:
    """So many iterations in which a gradient of 1 was found finite, without the optimizer."""
    weight = torch.nn.Parameter(torch.ones(1))
    for _ in range(times):
        weight.grad = torch.ones(1)
        scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
        scaler.update()


@pytest.mark.parametrize("as_writer", [False, True])
def test_a_callback_gets_plain_numbers_under_three_tags(as_writer: bool) -> None:
    writer, scaler = Writer(), a_scaler()
    history = ScaleHistory(scaler, callback=writer if as_writer else writer.add_scalar, every=2)
    history.note_norm(torch.tensor(0.5))
    update(scaler, 2)
    assert writer.told == [
        ("amp/scale", 64.0, 0),
        ("amp/skipped", 0.0, 0),
        ("amp/grad_norm", 0.5, 0),
        ("amp/scale", 64.0, 1),
        ("amp/skipped", 0.0, 1),
    ]
    assert {type(value) for _, value, _ in writer.told} == {float}
    assert {type(step) for _, _, step in writer.told} == {int}


def steps_told(told: Told) -> list[int]:
    return [step for tag, _, step in told if tag.endswith("/scale")]


@pytest.mark.parametrize("read_between", [False, True])
def test_it_hears_of_every_row_once_and_in_batches(read_between: bool) -> None:
    writer, scaler = Writer(), a_scaler()
    history = ScaleHistory(scaler, callback=writer, every=4, tag="generator/", start=100)
    seen = []
    for _ in range(10):
        update(scaler, 1)
        if read_between:
            history.rows()
        seen.append(len(steps_told(writer.told)))
    assert seen == [0, 0, 0, 4, 4, 4, 4, 8, 8, 8]
    history.close()
    history.flush()
    assert steps_told(writer.told) == list(range(100, 110))
    assert {tag for tag, _, _ in writer.told} == {"generator/scale", "generator/skipped"}


def test_rows_are_told_before_they_are_dropped() -> None:
    writer, scaler = Writer(), a_scaler()
    history = ScaleHistory(scaler, callback=writer, every=1000, keep=3)
    update(scaler, 10)
    history.flush()
    assert steps_told(writer.told) == list(range(10))


def test_the_scaler_keeps_a_history_that_nobody_else_does() -> None:
    writer, scaler = Writer(), a_scaler()
    ScaleHistory(scaler, callback=writer, every=1)
    update(scaler, 3)
    assert steps_told(writer.told) == [0, 1, 2]


def test_a_callback_that_raises_leaves_a_scaler_that_goes_on() -> None:
    told: Told = []

    def callback(*what: Any) -> None:
        told.append(what)
        if what == ("amp/scale", 64.0, 1):
            msg = "the disk is full"
            raise OSError(msg)

    scaler = a_scaler()
    ScaleHistory(scaler, callback=callback, every=1)
    update(scaler, 1)
    with pytest.raises(OSError, match="the disk is full"):
        update(scaler, 1)
    assert scaler._per_optimizer_states == {}
    update(scaler, 2)
    assert steps_told(told) == [0, 1, 2, 3]
    assert scaler.get_scale() == 128.0  # three of the four iterations, as without a callback
