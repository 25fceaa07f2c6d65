"""The ways of storing a model's weights that are compared, and a training step that is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.calls import LOW

# Steps too small to bring a weight anywhere in the time of a measurement.
RATE = 1e-6

# How `mezzo.torch.prepare` is called, by the name of the way.
OPTIONS: dict[str, dict[str, Any]] = {"prepare": {}, "compiled": {"compiled": True}, "kahan": {"masters": "kahan"}}
WAYS = ("autocast", "bfloat16", *OPTIONS)


@dataclass
class Stored:
    """A model with its input, and the region to run it in."""

    model: nn.Module
    inputs: Tensor
    region: Callable[[], AbstractContextManager[Any]]

    def output(self) -> Tensor:
        with self.region():
            return self.model(self.inputs)


def store(way: str, model: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Stored:
    """Store the weights of a float32 model in one of `WAYS`; PyTorch's two do without mezzo."""
    if way == "autocast":
        return Stored(model, inputs, lambda: torch.autocast("cpu", dtype=LOW))
    if way == "bfloat16":
        return Stored(model.to(LOW), inputs.to(LOW), nullcontext)
    from mezzo.torch import autocast, prepare

    prepare(model, optimizer, dtype=LOW, **OPTIONS[way])
    return Stored(model, inputs, lambda: autocast("cpu", dtype=LOW))


class Training:
    """A stored model with AdamW's fused steps towards a fixed target."""

    def __init__(self, way: str, model: nn.Module, inputs: Tensor) -> None:
        self.way = way
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
        self.stored = store(way, model, inputs, self.optimizer)
        self.model = self.stored.model
        # A layer norm ends the encoder: without a target to miss, almost no gradient would get past it.
        self.target = torch.randn(inputs.shape)

    def backward(self) -> None:
        (self.stored.output().float() - self.target).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
