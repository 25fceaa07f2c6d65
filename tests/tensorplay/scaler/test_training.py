"""The scaler and autocast together: float16 nets that train, and regions that stay open around everything."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import tensorplay as tp

from mezzo.tensorplay import autocast

from .runs import OPTIMIZERS, scaler_of


def data() -> tuple[Any, Any]:
    tp.manual_seed(0)
    x = tp.randn(64, 8)
    return x, (x[:, 0:1] * x[:, 1:2] + x[:, 2:3]).tanh()


def net() -> Any:
    tp.manual_seed(1)
    nn = tp.nn
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))


def train(
    model: Any, optimizer: Any, scaler: Any, steps: int, *, factor: float = 1.0, outer: bool = False
) -> list[float]:
    """Train in float16; ``outer`` keeps one region open around all iterations."""
    x, y = data()
    losses = []
    with autocast("cpu", dtype=tp.float16) if outer else contextlib.nullcontext():
        for _ in range(steps):
            optimizer.zero_grad()
            with contextlib.nullcontext() if outer else autocast("cpu", dtype=tp.float16):
                loss = ((model(x) - y) ** 2).mean()
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("outer", [False, True], ids=["a region a step", "one region"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "fused Adam", "fused AdamW"])
def test_a_float16_net_trains(name: str, outer: bool) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    scaler = scaler_of()
    losses = train(model, optimizer, scaler, 60, outer=outer)
    assert all(math.isfinite(one) for one in losses)
    # Float32 goes from 0.66 to 0.005 in as many steps.
    assert losses[-1] < 0.05 * losses[0]
    assert scaler.steps_taken(optimizer) == 60


@pytest.mark.parametrize("outer", [False, True], ids=["a region a step", "one region"])
def test_steps_are_skipped_until_the_scale_fits_and_gradients_come_after_that(outer: bool) -> None:
    model = net()
    optimizer = tp.optim.SGD(model.parameters(), lr=0.05)
    # The gradient of the float16 output is then above what float16 holds.
    scaler = scaler_of(init_scale=2.0**24)
    losses = train(model, optimizer, scaler, 30, outer=outer)
    assert 1 <= 30 - scaler.steps_taken(optimizer) <= 12
    assert losses[-1] < losses[0]
    assert all(one.grad is not None for one in model.parameters())


def test_small_gradients_survive_only_with_the_scale() -> None:
    def gradient_of(scale: float) -> Any:
        model = tp.nn.Linear(4, 1)
        optimizer = tp.optim.SGD(model.parameters(), lr=1.0)
        scaler = scaler_of(init_scale=scale)
        with autocast("cpu", dtype=tp.float16):
            out = model(tp.ones(2, 4))
        # Each output's gradient is 2**-27, which float16 does not have.
        scaler.scale(out.to(tp.float32).sum() * 2.0**-27).backward()
        scaler.unscale_(optimizer)
        return model.weight.grad.tolist()

    assert gradient_of(1.0) == [[0.0] * 4]
    assert gradient_of(2.0**16) == [[2.0**-26] * 4]


def test_the_scaler_inside_of_a_region_divides_the_same() -> None:
    weight = tp.nn.Parameter(tp.tensor([1.0, 2.0]))
    optimizer = tp.optim.SGD([weight], lr=0.125)
    scaler = scaler_of()
    with autocast("cpu", dtype=tp.bfloat16):
        weight.grad = tp.tensor([1.0 + 2.0**-20, 3.0]) * scaler.scale(tp.ones(()))
        scaler.unscale_(optimizer)
        assert weight.grad.dtype == tp.float32
        assert weight.grad.tolist() == [1.0 + 2.0**-20, 3.0]
        weight.grad[0] = math.inf
        scaler.step(optimizer)
    # The verdict is that of unscale_.
    assert scaler.stepped(optimizer)
    scaler.update()
    with autocast("cpu", dtype=tp.float16):
        scaler.scale(tp.ones(()))
        scaler.step(optimizer)
    assert [one.inf for one in scaler.nonfinite(optimizer)] == [1]


def test_a_gradient_that_was_lost_in_the_graph_is_told(caplog: pytest.LogCaptureFixture) -> None:
    weight = tp.nn.Parameter(tp.tensor([1.0]))
    optimizer = tp.optim.SGD([weight], lr=0.125)
    scaler = scaler_of()
    loss = (weight * weight).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    # TensorPlay adds nothing where PyTorch raises; its own scaler then says "No inf checks were recorded".
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert "or the graph was used up by an earlier backward()" in caplog.text
    assert weight.tolist() == [0.75]
