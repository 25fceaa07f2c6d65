"""The history of a scale on the stand-in, where steps are decided on the device: no read until somebody asks, then one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from standin_backend import calls
from torch import nn

from mezzo.torch import GradScaler
from mezzo.torch.scaling.device_rows import DeviceRows
from mezzo.torch.scaling.scale_history import ScaleHistory
from tests.torch.scaler_contract.optimizers import Momentum

D = "standin"
FACTORS = (1.0, float("inf"), 1.0, float("nan"), 2.0)
SCALES, SKIPPED = [64.0, 64.0, 32.0, 32.0, 16.0], [False, True, False, True, False]


def host_reads(ran: list[Any]) -> int:
    return sum(call.host_read for call in ran)


def iterate(scaler: GradScaler, weight: nn.Parameter, optimizer: torch.optim.Optimizer, *, clip: bool) -> None:
    for factor in FACTORS:
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        if clip:
            scaler.clip_grad_norm_([weight], 100.0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("kind", ["clipped", "computed", "none"])
def test_steps_that_the_device_decides_are_taken_down_without_a_read(kind: str) -> None:
    weight = nn.Parameter(torch.ones(4, device=D))
    optimizer = Momentum([weight], scaled=True)
    scaler = GradScaler(D, init_scale=64.0)
    history = ScaleHistory(scaler, norms=kind == "computed")
    with calls() as ran:
        iterate(scaler, weight, optimizer, clip=kind == "clipped")
    assert host_reads(ran) == 0
    with calls() as ran:
        columns = history.as_dict()
    assert host_reads(ran) == 1
    assert (columns["step"], columns["scale"], columns["skipped"]) == ([0, 1, 2, 3, 4], SCALES, SKIPPED)
    # Four gradients of 1, of 2 in the last iteration: the norm is without the scale.
    norms = ["None"] * 5 if kind == "none" else ["2.0", "inf", "2.0", "nan", "4.0"]
    assert list(map(str, columns["norm"])) == norms
    with calls() as ran:
        assert history.rows()[4].scale == 16.0
    assert ran == []


def test_a_callback_costs_one_read_for_so_many_rows() -> None:
    weight = nn.Parameter(torch.ones(4, device=D))
    optimizer = Momentum([weight], scaled=True)
    scaler, told = GradScaler(D, init_scale=64.0), []
    ScaleHistory(scaler, callback=lambda tag, value, step: told.append((tag, value, step)), every=5)
    with calls() as ran:
        iterate(scaler, weight, optimizer, clip=False)
    assert [value for tag, value, _ in told if tag == "amp/scale"] == SCALES
    assert [value for tag, value, _ in told if tag == "amp/skipped"] == list(map(float, SKIPPED))
    assert host_reads(ran) == 1


def test_a_norm_on_another_device_is_taken_along() -> None:
    scaler = GradScaler("cpu")
    history = ScaleHistory(scaler)
    scaler.scale(torch.ones(()))
    history.note_norm(torch.full((1,), 3.0, device=D))
    history.note_norm(2)
    scaler.update()
    assert history.rows()[0].norm == 3.0


def test_rows_follow_a_scale_that_changes_its_device() -> None:
    rows = DeviceRows(keep=1000)
    devices = ["cpu"] * 3 + [D] * 70 + ["cpu"] * 2
    for number, device in enumerate(devices):
        rows.cells(torch.device(device, 0 if device == D else None))[0].fill_(number)
        rows.commit()
    with calls() as ran:
        assert [row[0] for row in rows.read()] == list(range(75))
    assert host_reads(ran) == 1
    assert rows.read() == []
