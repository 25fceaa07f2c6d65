"""Training on the stand-in equals training on the CPU by the same rules, to the last bit.

The stand-in computes with the CPU's kernels, and both follow the reference list; so whatever differs is a cast, a scale or a
skipped step that went differently. Two things have to be seen to (`runs`): attention in several ops on both, and a chance of
dropout whose scale needs no rounding. Plain PyTorch takes other kernels for these on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from standin_backend import Call, calls
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo.torch

from .runs import NETS, OPTIMIZERS, D, by_the_same_rules, same, train

AUTOCASTS = {"mezzo": mezzo.torch.autocast, "torch": torch.autocast}
SCALERS = {"mezzo": mezzo.torch.GradScaler, "torch": torch.amp.GradScaler}
DECORATORS = {
    "mezzo": (mezzo.torch.custom_fwd, mezzo.torch.custom_bwd),
    "torch": (torch.amp.custom_fwd, torch.amp.custom_bwd),
}
nets = pytest.mark.parametrize("net", NETS)
autocasts = pytest.mark.parametrize("autocast", AUTOCASTS.values(), ids=AUTOCASTS)
scalers = pytest.mark.parametrize("scaler", SCALERS.values(), ids=SCALERS)
decorators = pytest.mark.parametrize("decorators", DECORATORS.values(), ids=DECORATORS)
low_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
START = {"init_scale": 2.0**10, "growth_interval": 2}


@nets
def test_in_float32(net: str) -> None:
    there = train(net, D)
    assert there.equals(train(net, "cpu"))
    assert there.losses[-1] < there.losses[0]


@nets
@autocasts
def test_in_bfloat16(net: str, autocast: Any) -> None:
    with calls() as ran:
        there = train(net, D, lambda: autocast(D, torch.bfloat16))
    assert there.equals(train(net, "cpu", by_the_same_rules(torch.bfloat16)))
    assert not there.equals(train(net, "cpu"))
    assert there.losses[-1] < there.losses[0]
    assert outputs(ran, "addmm") == {torch.bfloat16}
    assert outputs(ran, "nll_loss_forward") == {torch.float32}


@nets
@autocasts
@scalers
def test_in_float16_with_a_scaler_clipping_and_a_skipped_step(net: str, autocast: Any, scaler: Any) -> None:
    case = {"broken": [2], "clip": 0.5}
    there = train(net, D, lambda: autocast(D, torch.float16), scaler(D, **START), **case)
    assert there.equals(train(net, "cpu", by_the_same_rules(torch.float16), scaler("cpu", **START), **case))
    assert there.scales == [1024, 2048, 1024, 1024, 2048, 2048]
    assert moved(there.weights) == [True, False, True, True, True]


@scalers
def test_in_float16_without_clipping(scaler: Any) -> None:
    case = {"broken": [0, 3], "steps": 5}
    there = train("mlp", D, lambda: torch.autocast(D), scaler(D, **START), **case)
    assert there.equals(train("mlp", "cpu", by_the_same_rules(torch.float16), scaler("cpu", **START), **case))
    assert moved(there.weights) == [True, True, False, True]
    assert there.scales == [512, 512, 1024, 512, 512]


def moved(weights: list[list[Tensor]]) -> list[bool]:
    """Say for each step but the first whether it changed the first parameter."""
    return [not torch.equal(before[0], after[0]) for before, after in pairwise(weights)]


def outputs(ran: list[Call], op: str) -> set[torch.dtype | None]:
    """Give the dtypes in which the device gave the results of an op; fail if it never ran."""
    found = {call.output for call in ran if call.op == op}
    assert found, f"{op} never ran"
    return found


def parts(device: str) -> tuple[nn.Module, Tensor, Tensor, torch.optim.Optimizer]:
    """Make the net of words: it has the fused optimizer, which decides on the device whether it steps."""
    torch.manual_seed(0)
    net = NETS["words"][0]().to(device)
    inputs, labels = torch.randint(0, 11, (16, 6)).to(device), torch.randint(0, 5, (16,)).to(device)
    return net, inputs, labels, OPTIMIZERS["words"](net.parameters())


class TestHostReads:
    """A loop that waits for the device in no step, or once where an optimizer has to be told."""

    def loop(self, scaler: Any, optimizer: Callable[[Any], torch.optim.Optimizer]) -> list[str]:
        net, inputs, labels, _ = parts(D)
        chosen = optimizer(net.parameters())
        with calls() as ran:
            for _ in range(6):
                chosen.zero_grad()
                with mezzo.torch.autocast(D):
                    loss = F.cross_entropy(net(inputs), labels)
                scaler.scale(loss).backward()
                scaler.step(chosen)
                scaler.update()
        assert any(call.op == "_amp_update_scale_" for call in ran) == scaler.is_enabled()
        return [call.op for call in ran if call.host_read]

    def test_without_a_scaler_there_are_none(self) -> None:
        scaler = mezzo.torch.GradScaler(D, enabled=False)
        assert self.loop(scaler, lambda params: torch.optim.SGD(params, lr=0.1)) == []

    @scalers
    def test_with_a_scaler_there_is_one_per_step(self, scaler: Any) -> None:
        reads = self.loop(scaler(D), lambda params: torch.optim.SGD(params, lr=0.1))
        assert reads == ["_local_scalar_dense"] * 6

    @scalers
    def test_with_a_fused_optimizer_there_are_none(self, scaler: Any) -> None:
        reads = self.loop(scaler(D), lambda params: torch.optim.AdamW(params, fused=True))
        assert reads == []


class TestCheckpoint:
    @low_dtypes
    @autocasts
    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
    def test_recomputation_has_the_casts_and_the_dropout_of_the_forward_pass(
        self, reentrant: bool, autocast: Any, dtype: torch.dtype
    ) -> None:
        plain = self.gradients(autocast(D, dtype), None)
        with calls() as ran:
            again = self.gradients(autocast(D, dtype), reentrant)
        assert all(map(torch.equal, plain, again))
        products = [call.output for call in ran if call.op == "addmm"]
        assert products == [dtype] * (4 if reentrant else 3)  # two forward, and again; not the last if nothing needs it
        assert not all(map(torch.equal, plain, self.gradients(autocast(D, dtype), reentrant, preserve=False)))

    def gradients(self, region: Any, reentrant: bool | None, *, preserve: bool = True) -> list[Tensor]:
        """Give the gradients of a net with dropout; ``reentrant=None`` means no checkpointing."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.LayerNorm(32), nn.Linear(32, 3)).to(D)
        x = torch.randn(4, 8, device=D, requires_grad=True)
        with region:
            how = {"use_reentrant": reentrant, "preserve_rng_state": preserve}
            y = net(x) if reentrant is None else checkpoint(net, x, **how)
            loss = y.float().square().sum()
        loss.backward()
        return [x.grad, *(parameter.grad for parameter in net.parameters())]


class TestCustomFunctions:
    @decorators
    @autocasts
    def test_cast_inputs(self, decorators: Any, autocast: Any) -> None:
        fwd, bwd = decorators
        seen: list[Any] = []

        class Scaled(torch.autograd.Function):
            @staticmethod
            @fwd(device_type=D, cast_inputs=torch.float32)
            def forward(ctx: Any, x: Tensor, other: list[Tensor]) -> Tensor:
                seen.append((x.dtype, other[0].dtype, torch.is_autocast_enabled(D)))
                ctx.save_for_backward(x)
                return (x @ x) + other[0]

            @staticmethod
            @bwd(device_type=D)
            def backward(ctx: Any, grad: Tensor) -> Any:
                (x,) = ctx.saved_tensors
                seen.append((grad.dtype, x.dtype, torch.is_autocast_enabled(D)))
                return grad @ x, None

        x = torch.eye(2, device=D, dtype=torch.bfloat16).requires_grad_()
        with autocast(D, torch.bfloat16):
            y = Scaled.apply(x, [x.detach()])
        y.sum().backward()
        assert seen == [(torch.float32, torch.float32, False)] * 2
        assert (y.dtype, x.grad.dtype) == (torch.float32, torch.bfloat16)
        assert x.grad.tolist() == [[1.0, 1.0]] * 2

    @decorators
    @low_dtypes
    def test_backward_runs_in_the_state_of_forward(self, decorators: Any, dtype: torch.dtype) -> None:
        fwd, bwd = decorators

        class Product(torch.autograd.Function):
            @staticmethod
            @fwd(device_type=D)
            def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
                ctx.save_for_backward(a, b)
                return a @ b

            @staticmethod
            @bwd(device_type=D)
            def backward(ctx: Any, grad: Tensor) -> Any:
                a, b = ctx.saved_tensors
                return grad @ b.t(), a.t() @ grad

        def run(device: str, region: Any) -> tuple[Tensor, Tensor]:
            torch.manual_seed(0)
            a, b = (torch.randn(3, 3).to(device).requires_grad_() for _ in range(2))
            with region:
                y = Product.apply(a, b) if device == D else a @ b
            y.float().sum().backward()
            return a.grad, b.grad

        with calls() as ran:
            there = run(D, mezzo.torch.autocast(D, dtype))
        here = run("cpu", by_the_same_rules(dtype)())
        assert all(map(same, there, here))
        assert [call.output for call in ran if call.op == "mm"] == [dtype] * 3
