"""The scale moves as in every other adapter, and where the package's own rule is the same, as its own scaler."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import tensorplay as tp

from mezzo.tensorplay import GradScaler
from tests.conformance.scale_sequences import SEQUENCES, ScaleSequence

from .runs import FACTORS


def run(scaler: Any, sequence: ScaleSequence) -> list[tuple[float, int]]:
    if sequence.start is not None:
        numbers = asdict(sequence.numbers)
        state = {name: numbers[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
        start = {"scale": sequence.start.scale, "_growth_tracker": sequence.start.growth_tracker}
        scaler.load_state_dict({**state, **start})
    weight = tp.nn.Parameter(tp.tensor([1.0]))
    optimizer = tp.optim.SGD([weight], lr=0.0)
    reached = []
    for letter in sequence.found:
        scaler.scale(tp.ones(()))
        # Put there, since a loss times a scale near 2**127 would overflow by itself.
        weight.grad = tp.tensor([FACTORS[letter]])
        scaler.step(optimizer)
        scaler.update()
        reached.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return reached


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda one: one.name)
def test_the_scale_moves_as_written(sequence: ScaleSequence) -> None:
    scaler = GradScaler("cpu", **asdict(sequence.numbers))
    assert run(scaler, sequence) == list(sequence.reached)


# PyTorch's kernel leaves out a growth to infinity. The package's does not.
BEYOND = {"to the last finite value", "to the last finite value, waiting", "ceiling at the largest float32"}
ALIKE = [one for one in SEQUENCES if one.as_pytorch and one.name not in BEYOND]


@pytest.mark.parametrize("sequence", ALIKE, ids=lambda one: one.name)
def test_the_package_moves_it_likewise(sequence: ScaleSequence) -> None:
    numbers = asdict(sequence.numbers)
    shared = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    native = tp.amp.GradScaler("cpu", **{name: numbers[name] for name in shared})
    assert run(native, sequence) == list(sequence.reached)


def test_a_healthy_run_is_the_packages_to_the_bit() -> None:
    def train(scaler: Any) -> tuple[list[float], list[Any]]:
        weight = tp.nn.Parameter(tp.tensor([1.0, -2.0, 3.0]))
        optimizer = tp.optim.SGD([weight], lr=0.1, momentum=0.9)
        scales, weights = [], []
        for letter in "FFIFFFNFFFF":
            optimizer.zero_grad()
            scaler.scale((weight * weight * 0.3).sum() * FACTORS[letter]).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            weights.append(weight.tolist())
        return scales, weights

    # No power of two, so that each division rounds.
    numbers: dict[str, Any] = {"init_scale": 1000.0, "growth_factor": 3.0, "backoff_factor": 0.7, "growth_interval": 3}
    assert train(GradScaler("cpu", **numbers)) == train(tp.amp.GradScaler("cpu", **numbers))
