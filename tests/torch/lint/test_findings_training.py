"""Findings in training loops: recorded loops, and near misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo.torch
from mezzo.report import Finding
from mezzo.torch import autocast, explain

from .made import kinds, op

LOW = torch.bfloat16
AMPS = ["mezzo", "torch"]


def scaler_of(amp: str) -> Any:
    return mezzo.torch.GradScaler("cpu") if amp == "mezzo" else torch.amp.GradScaler("cpu")


def found(explained: explain, kind: str) -> list[Finding]:
    return [one for one in explained.report.warnings if one.kind == kind]


@pytest.mark.parametrize("given", [False, True], ids=["loss", "with a gradient"])
@pytest.mark.parametrize("region", [autocast, torch.autocast], ids=AMPS)
def test_a_backward_pass_inside_of_a_region_is_found(region: Any, given: bool) -> None:
    net = nn.Linear(4, 4)
    with explain() as explained:
        with region("cpu", dtype=LOW):
            loss = net(torch.ones(2, 4)).sum()
            loss.backward(torch.ones_like(loss) if given else None)
    [finding] = found(explained, "backward in region")
    assert "inside of the region of bfloat16" in finding.message
    assert "one level further left" in finding.advice
    assert finding.source is not None


def test_each_backward_pass_inside_of_a_region_is_counted() -> None:
    net = nn.Linear(4, 4)
    with explain() as explained:
        for _ in range(3):
            with autocast("cpu", dtype=LOW):
                net(torch.ones(2, 4)).sum().backward()
    [finding] = found(explained, "backward in region")
    assert finding.count == 3


def test_a_backward_pass_behind_the_region_is_not_found() -> None:
    net = nn.Linear(4, 4)
    with explain() as explained:
        with autocast("cpu", dtype=LOW):
            loss = net(torch.ones(2, 4)).sum()
        loss.backward()
    assert found(explained, "backward in region") == []


class Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad @ x.T + x.T @ grad


def test_a_custom_function_that_enters_the_region_again_is_not_found() -> None:
    x = torch.rand(4, 4, requires_grad=True)
    with explain() as explained:
        with autocast("cpu", dtype=LOW):
            loss = Square.apply(x)
        loss.backward(torch.ones(4, 4, dtype=loss.dtype))
        with autocast("cpu", dtype=LOW):
            loss = Square.apply(x).sum()
        loss.backward()
    assert any(record.phase == "backward" and "bfloat16" in record.used for record in explained.report.records)
    assert found(explained, "backward in region") == []


def test_a_backward_pass_of_which_a_part_is_in_a_region_is_not_found() -> None:
    part, rest = op("mm", 0, phase="backward"), op("mul", 1, phase="backward", autocast=None)
    assert kinds(part, rest) == []
    assert kinds(part) == ["backward in region"]


def step(scaler: Any, *, clip: str) -> explain:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with explain(model=net) as explained:
        for _ in range(2):
            with autocast("cpu", dtype=torch.float16):
                loss = net(torch.ones(2, 4)).float().sum()
            scaler.scale(loss).backward()
            if clip == "after unscale_":
                scaler.unscale_(optimizer)
            if clip == "scaler":
                scaler.clip_grad_norm_(optimizer, 1.0)
            elif clip == "value":
                torch.nn.utils.clip_grad_value_(net.parameters(), 1.0)
            elif clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return explained


@pytest.mark.parametrize("clip", ["scaled", "value"])
@pytest.mark.parametrize("amp", AMPS)
def test_clipping_of_scaled_gradients_is_found(amp: str, clip: str) -> None:
    [finding] = found(step(scaler_of(amp), clip=clip), "scaled gradients clipped")
    assert finding.count == 2
    assert finding.source is not None
    assert finding.source.function == "step"
    assert finding.advice.startswith("scaler.unscale_(optimizer) before it")


@pytest.mark.parametrize(
    ("amp", "clip"), [("mezzo", "after unscale_"), ("torch", "after unscale_"), ("mezzo", "scaler"), ("mezzo", "")]
)
def test_clipping_of_unscaled_gradients_or_by_the_scaler_is_not_found(amp: str, clip: str) -> None:
    assert found(step(scaler_of(amp), clip=clip), "scaled gradients clipped") == []


def test_clipping_without_a_scaler_is_not_found() -> None:
    assert found(step(torch.amp.GradScaler("cpu", enabled=False), clip="scaled"), "scaled gradients clipped") == []


def test_a_step_ends_what_a_scaler_has_scaled() -> None:
    scale, step_, clip = (op("mul", i, callers=(name,)) for i, name in enumerate(("scale", "step", "clip_grad_norm_")))
    assert kinds(scale, step_, clip) == []
    assert kinds(scale, clip) == ["scaled gradients clipped"]
