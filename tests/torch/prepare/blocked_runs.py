"""Runs with compensated or stochastically rounded weights, in blocks and with whole tensors, and what tells them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import mezzo.torch
from mezzo.torch.masters.params import masters_in

BF16 = torch.bfloat16
SHAPES = [(3,), (), (0,), (1,), (17, 33), (2**16 + 5,), (8, 4, 3, 3), (5, 1)]
"""They share a block; one is more than is rounded at a time."""


class AdamW(torch.optim.AdamW):
    """Not exactly the class that is known: it sees float32 values and gradients of all parameters at once."""


class Adam(torch.optim.Adam):
    """As above."""


class SGD(torch.optim.SGD):
    """As above."""


MODES: dict[str, dict[str, Any]] = {
    "kahan": {"masters": "kahan"},
    "none stochastic": {"masters": False, "rounding": "stochastic", "seed": 3},
    "kahan stochastic": {"masters": "kahan", "rounding": "stochastic", "seed": 4},
    "masters stochastic": {"rounding": "stochastic", "seed": 5},
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
Kind = tuple[Any, Any, dict[str, Any]]
KINDS: dict[str, Kind] = {
    "adamw": (torch.optim.AdamW, AdamW, {"weight_decay": 0.3}),
    "adam": (torch.optim.Adam, Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "sgd": (torch.optim.SGD, SGD, {}),
    "sgd momentum": (torch.optim.SGD, SGD, {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}),
}


class Weights(nn.Module):
    """Parameters whose gradient is given; those of four dimensions are channels-last."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList(torch.randn(shape) for shape in shapes)
        for one in self.all:
            if one.dim() == 4:
                one.data = one.data.contiguous(memory_format=torch.channels_last)


class Run:
    """A prepared model and its optimizer."""

    def __init__(self, cls: Any, mode: dict[str, Any], shapes: list[tuple[int, ...]], **options: Any) -> None:
        self.model = Weights(shapes)
        parameters = list(self.model.all)
        self.optimizer: Any = cls(parameters, **{"lr": 0.01, "fused": True, **options})
        mezzo.torch.prepare(self.model, self.optimizer, low="**", **mode)
        self.masters = masters_in(self.optimizer)
        self.owner = self.masters[0].owner
        self.steps = 0

    def give_gradients(self) -> None:
        generator = torch.Generator().manual_seed(self.steps)
        for one in self.model.all:
            gradient = torch.randn(one.shape, generator=generator).to(one.dtype)
            one.grad = torch.empty_like(one).copy_(gradient)
        self.steps += 1

    def step(self) -> None:
        self.give_gradients()
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Give all that a step may change."""
        found: dict[str, Tensor] = {"rounds": torch.tensor(self.owner.rounds)}
        for number, one in enumerate(self.masters):
            found[f"{number} weight"] = one.model_param.detach()
            if one.compensation is not None:
                found[f"{number} compensation"] = one.compensation
            if one.owner.settings.keeps_masters:
                found[f"{number} master"] = one.values()
            for name, value in self.optimizer.state.get(one, {}).items():
                found[f"{number} {name}"] = value
        return found

    def copies(self) -> dict[str, Tensor]:
        return {name: one.clone() for name, one in self.tensors().items()}


def both(kind: Kind, mode: dict[str, Any], shapes: list[tuple[int, ...]] = SHAPES) -> tuple[Run, Run]:
    """Give a run in blocks and one with whole tensors."""
    in_blocks, whole, options = kind
    return Run(in_blocks, mode, shapes, **options), Run(whole, mode, shapes, **options)


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert list(first) == list(second)
    for name, one in first.items():
        other = second[name]
        assert (one.dtype, one.stride()) == (other.dtype, other.stride()), name
        same = torch.equal(one.view(torch.int16), other.view(torch.int16)) if one.dtype is BF16 and one.dim() else None
        assert same if same is not None else torch.equal(one, other), name


def fused_calls(call: Callable[[], object]) -> int:
    """Count the calls of PyTorch's fused kernel of AdamW: one per block, and one for all that is left to the optimizer."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return sum(one.name == "aten::_fused_adamw_" for one in found.events())


def peak_of(call: Callable[[], object]) -> int:
    """Give how many bytes of tensors there are in a call at most, above those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    events = [one for one in found.profiler.kineto_results.events() if one.name() == "[memory]"]
    there = highest = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        there += event.nbytes()
        highest = max(highest, there)
    return highest
