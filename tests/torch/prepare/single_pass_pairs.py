"""The same parameters twice, with masters and without, to compare steps in one pass with an optimizer's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch.masters.blocked_pass import BLOCK
from mezzo.torch.masters.params import Master, make_master
from mezzo.torch.masters.settings import Owner, Settings
from mezzo.torch.masters.single_pass import update_

BF16 = torch.bfloat16
Make = Callable[[Any], torch.optim.Optimizer]
Sizes = Sequence[tuple[int, ...]]

# Small ones that share a block, none or one element, a whole block, and more than one with a rest that fills no vector.
SIZES: Sizes = ((3,), (1,), (), (0,), (17, 33), (BLOCK,), (BLOCK // 8 + 1, 8))
FEW: Sizes = ((5,), (200, 200))


class Pair:
    """The same parameters twice: low with masters, and in float32 for the optimizer's own step."""

    def __init__(
        self, make: Make, sizes: Sizes = FEW, low: torch.dtype = BF16, gradient: torch.dtype | None = None
    ) -> None:
        torch.manual_seed(0)
        owner = Owner(Settings(low))
        start = [torch.randn(size) for size in sizes]
        self.low = [nn.Parameter(one.to(low)) for one in start]
        self.masters = [make_master(one.clone(), p, owner) for one, p in zip(start, self.low, strict=True)]
        self.plain = [nn.Parameter(one.clone()) for one in start]
        self.one, self.own = make(self.masters), make(self.plain)
        self.gradient = low if gradient is None else gradient
        for parameter in self.low:
            parameter.grad_dtype = self.gradient

    def give_gradients(self, scale: float = 1.0) -> None:
        for low, plain in zip(self.low, self.plain, strict=True):
            low.grad = (torch.randn(low.shape) * scale).to(self.gradient)
            plain.grad = low.grad.float().clone()

    def update(self, *, compiled: bool = False) -> list[Master]:
        return [one for group in self.one.param_groups for one in update_(self.one, group, compiled=compiled)]

    def step(self, *, compiled: bool = False) -> None:
        self.give_gradients()
        assert self.update(compiled=compiled) == self.masters
        self.own.step()

    def values(self) -> list[Tensor]:
        """Copies of all that a step may change."""
        kept = [tensor for one in self.masters for tensor in self.one.state.get(one, {}).values()]  # type: ignore[call-overload]
        return [one.clone() for one in [*self.low, *(each.values() for each in self.masters), *kept]]

    def assert_same(self) -> None:
        for low, master, plain in zip(self.low, self.masters, self.plain, strict=True):
            assert torch.equal(master.values(), plain)
            assert torch.equal(low, plain.to(low.dtype))
            mine, theirs = self.one.state.get(master, {}), self.own.state.get(plain, {})  # type: ignore[call-overload]
            assert list(mine) == list(theirs)
            for name, value in theirs.items():
                assert mine[name].dtype is value.dtype
                assert mine[name].stride() == value.stride()
                assert torch.equal(mine[name], value), name

    def assert_close(self, steps: int) -> None:
        """Each step rounds the same few operations, of a result no larger than 8 here, in another order or not at all.

        So it may add a few units in the last place of the values; four of 8 are allowed, which is far from what a wrong
        sign, factor or bias correction gives with learning rates of 0.01.
        """
        allowed = 4 * steps * 8 * torch.finfo(torch.float32).eps
        for low, master, plain in zip(self.low, self.masters, self.plain, strict=True):
            assert torch.allclose(master.values(), plain, rtol=0, atol=allowed)
            assert torch.equal(low, master.values().to(low.dtype))
            mine, theirs = self.one.state.get(master, {}), self.own.state.get(plain, {})  # type: ignore[call-overload]
            assert list(mine) == list(theirs)
            for name, value in theirs.items():
                assert mine[name].dtype is value.dtype
                assert torch.allclose(mine[name], value, rtol=1e-4, atol=allowed), name


def making(kind: type[torch.optim.Optimizer], **options: Any) -> Make:
    return lambda parameters: kind(parameters, **{"lr": 0.01, "fused": True, **options})  # type: ignore[call-arg]


ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
VARIANTS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (ADAMW, {}),
    "adamw decay": (ADAMW, {"weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-6}),
    "adamw amsgrad maximize": (ADAMW, {"amsgrad": True, "maximize": True}),
    "adamw tensors": (ADAMW, {"lr": torch.tensor(0.01), "betas": (torch.tensor(0.9), torch.tensor([0.99]))}),
    "adamw no decay": (ADAMW, {"weight_decay": 0.0}),
    "adam": (ADAM, {}),
    "adam decay": (ADAM, {"weight_decay": 0.1, "maximize": True}),
    "adam decoupled": (ADAM, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adam low beta1": (ADAM, {"betas": (0.3, 0.9)}),
    "adam beta1 of 0": (ADAM, {"betas": (0.0, 0.9), "amsgrad": True}),
    "sgd": (SGD, {}),
    "sgd decay": (SGD, {"weight_decay": 0.1, "maximize": True, "lr": torch.tensor(0.01)}),
    "sgd momentum": (SGD, {"momentum": 0.9}),
    "sgd nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd dampening": (SGD, {"momentum": 0.9, "dampening": 0.4, "maximize": True}),
}
both = pytest.mark.parametrize("compiled", [False, True], ids=["blocked", "compiled"])
kinds = pytest.mark.parametrize(
    ("kind", "options"), [(ADAMW, {}), (SGD, {"momentum": 0.9, "dampening": 0.4})], ids=["adamw", "sgd"]
)
