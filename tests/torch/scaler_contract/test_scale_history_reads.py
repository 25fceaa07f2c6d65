"""A history of a scale waits for the device when somebody asks, and never in the scaler's methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.torch import GradScaler
from mezzo.torch.scaling.scale_history import ScaleHistory

from .optimizers import Momentum, parameter
from .reading import counted_reads
from .test_host_reads import CONTRACT, UNMODIFIED, Make, fakes, iterate


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("options", [{}, {"norms": True}], ids=["scale", "norms"])
@pytest.mark.parametrize("make", [UNMODIFIED["foreach"], CONTRACT["Adam"]], ids=["unmodified", "contract"])
def test_an_iteration_reads_as_often_as_without_a_history(make: Make, options: dict[str, Any], clipped: bool) -> None:
    counts = []
    for watched in (False, True):
        weights = [parameter(), parameter(1.0, 2.0, 3.0)]
        optimizer, scaler = make(weights), GradScaler("cpu")
        if watched:
            ScaleHistory(scaler, **options)
        clip = scaler.clip_grad_norm_ if clipped else None
        counts.append([iterate(scaler, optimizer, weights, factor, clip=clip) for factor in (1.0, float("inf"), 1.0)])
    assert counts[0] == counts[1]
    assert counts[1][0]["update"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in of a GPU is not needed where there is one")
@pytest.mark.parametrize("options", [{}, {"norms": True}], ids=["scale", "norms"])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cuda:1")], ids=["one device", "two"])
def test_on_tensors_without_values_an_iteration_needs_none(
    devices: tuple[str, ...], clipped: bool, options: dict[str, Any]
) -> None:
    with FakeTensorMode(), torch.no_grad():
        weights = fakes(*devices)
        optimizer, scaler = Momentum(weights, scaled=True), GradScaler("cpu")
        history = ScaleHistory(scaler, **options)
        with counted_reads() as reads:
            for _ in range(3):
                scaler.scale(torch.empty((), device="cuda:0"))
                if clipped:
                    scaler.clip_grad_norm_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
        assert reads == []
        assert repr(history) == "<ScaleHistory: 3 rows, next step 3>"
        with counted_reads(answer=True) as reads:
            assert len(history.rows()) == 3
        assert reads != []
        with counted_reads() as reads:
            assert len(history.rows()) == 3
        assert reads == []
