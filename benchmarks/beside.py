"""PyTorch's own autocast on the CPU, in a process in which an accelerator has been registered, and in one without."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.calls import LOW
from benchmarks.work import Work, describe

if TYPE_CHECKING:
    from benchmarks.cases import Case
    from benchmarks.pairing import Side

Loop = Callable[[int], None]


def beside_work(case: Case, side: Side) -> Work:
    """Prepare the work of one side; nothing in it is mezzo's but the registration before it."""
    if side == "mezzo":
        _register()
    return _SUBJECTS[case.subject]()


def _register() -> None:
    from mezzo.torch import register_accelerator

    # Autocast is registered by name and dispatch key, so the device itself need not be able to do anything.
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", SimpleNamespace())
    register_accelerator("npu", dtypes=[torch.float16, torch.bfloat16])


def _training() -> Work:
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)]
    model, inputs = nn.Sequential(*layers), torch.randn(8, 64)
    # So slow that the weights, and with them the probe, stay what they are.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    def loop(count: int) -> None:
        for _ in repeat(None, count):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=LOW):
                output = model(inputs)
            output.float().square().mean().backward()
            optimizer.step()

    def probe() -> tuple[str, float]:
        loop(1)
        return describe(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))

    return Work(loop, probe)


def _product() -> Work:
    x = torch.randn(16, 16)

    def loop(count: int) -> None:
        with torch.autocast("cpu", dtype=LOW):
            for _ in repeat(None, count):
                torch.mm(x, x)

    def probe() -> tuple[str, float]:
        with torch.autocast("cpu", dtype=LOW):
            return describe(torch.mm(x, x))

    return Work(loop, probe)


def _entering() -> Work:
    def loop(count: int) -> None:
        for _ in repeat(None, count):
            with torch.autocast("cpu", dtype=LOW):
                pass

    def probe() -> tuple[str, float]:
        with torch.autocast("cpu", dtype=LOW):
            return str(torch.get_autocast_dtype("cpu")), float(torch.is_autocast_enabled("cpu"))

    return Work(loop, probe)


_SUBJECTS: dict[str, Callable[[], Work]] = {"training": _training, "mm": _product, "enter": _entering}
