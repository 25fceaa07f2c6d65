"""What a scaler costs: from scaled gradients to stepped parameters, with the optimizer's own work in it.

All sides share the parameters and their gradients, each with an optimizer and a scaler of its own. Before each
iteration, and outside of the timed part, every gradient is filled anew: 1.5 times the scale, the initial one, which
never moves here. So the numbers that are divided are the same in each iteration; nothing underflows, overflows, or is
divided twice.
"""

from __future__ import annotations

from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.work import Work, describe

if TYPE_CHECKING:
    from benchmarks.cases import Case
    from benchmarks.pairing import Side

SIZES = {"small": (300, 1_000), "large": (10, 10_000_000)}
GRADIENT = 1.5
# Steps too small to bring a parameter anywhere in the time of a measurement.
RATE = 1e-6
SCALE = 2.0**16
# Never reached: a scale that grew in the middle would be another work.
INTERVAL = 2**31 - 1


@cache
def _parameters(size: str) -> list[Tensor]:
    count, elements = SIZES[size]
    parameters = [torch.zeros(elements, requires_grad=True) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.zeros(elements)
    return parameters


def _optimizer(way: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if way == "fused":
        return torch.optim.Adam(parameters, lr=RATE, fused=True)
    return torch.optim.SGD(parameters, lr=RATE, foreach=True)


def _scaler(side: Side) -> Any:
    if side != "mezzo":
        return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=INTERVAL)
    from mezzo.torch import GradScaler

    return GradScaler("cpu", init_scale=SCALE, growth_interval=INTERVAL)


def scaler_work(case: Case, side: Side) -> Work:
    return steps_with(_scaler(side), case.subject)


def steps_with(scaler: Any, subject: str) -> Work:
    """Prepare steps with this scaler, new and of the scale `SCALE`: of which parameters and how, ``subject`` says."""
    size, _, way = subject.partition("-")
    parameters = _parameters(size)
    optimizer = _optimizer(way, parameters)
    scaler.scale(torch.ones(()))

    def scale_gradients() -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.fill_(GRADIENT * SCALE)

    def loop(count: int) -> None:
        for _ in repeat(None, count):
            if way == "unscale":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    def probe() -> tuple[str, float]:
        """How far one iteration moves the first parameter, in steps; and that the scale has stayed."""
        scale_gradients()
        before = parameters[0].detach().clone()
        loop(1)
        moved = (parameters[0].detach() - before).double() / RATE
        return describe((moved * scaler.get_scale() / SCALE).float())

    return Work(loop, probe, scale_gradients)
