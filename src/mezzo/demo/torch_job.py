"""PyTorch's part of the demo: both nets in every precision, one also with prepared weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mezzo.demo.data import as_tensors
from mezzo.demo.devices import describe, pick_device, single_threaded
from mezzo.demo.emulation import SLOW, float16_cost
from mezzo.demo.models import MODELS
from mezzo.demo.parts import Finished
from mezzo.demo.report import memory_table, results_table
from mezzo.demo.results import ways
from mezzo.demo.train import Run
from mezzo.demo.turns import train_in_turn

if TYPE_CHECKING:
    from rich.console import Console

    from mezzo.demo.arrays import ArrayPart
    from mezzo.demo.data import Digits
    from mezzo.demo.results import Plan, RunResult


class TorchPart:
    """The runs of PyTorch.

    Args:
        device: A PyTorch device; None takes CUDA, else another accelerator that has autocast, else the CPU.

    Raises:
        ValueError: If the device is not there or has no autocast.
    """

    def __init__(self, device: str | None) -> None:
        self._device = pick_device(device)

    def train(self, plan: Plan, digits: tuple[ArrayPart, ArrayPart], console: Console) -> Finished:
        """Train every run, on one thread of the CPU; where float16 is slow, its products run in float32 and are rounded."""
        with single_threaded():
            return self._train(as_tensors(*digits), plan, console)

    def _train(self, digits: Digits, plan: Plan, console: Console) -> Finished:
        where = describe(self._device)
        console.print(
            f"{len(digits.train)} digits to train on, {len(digits.test)} to test; {plan.epochs} epochs per run, on {where}"
        )
        cost = float16_cost(self._device)
        if cost > SLOW:
            plan = replace(plan, emulate_float16=True)
            console.print(
                f"PyTorch's float16 products take {cost:.0f} times as long as float32's here; "
                "the float16 runs compute them in float32 and round"
            )
        results = _results(digits.to(self._device), plan, console)
        return Finished(
            results, plan, self._setting(cost), tables=(results_table(results, where), memory_table(results))
        )

    def _setting(self, cost: float) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "device": {"type": self._device.type, "name": describe(self._device)},
            "threads": torch.get_num_threads(),
            # On CUDA, "float32" convolutions may use TF32; this is the setting for matrix products.
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "float16_cost": cost,  # what float16's own products take, as a multiple of float32's
        }


def _results(digits: Digits, plan: Plan, console: Console) -> list[RunResult]:
    groups = [{f"{model}, {way}": partial(Run, model, digits, way, plan) for way in ways(model)} for model in MODELS]
    return [run.result() for run in train_in_turn(groups, plan.epochs, console)]
