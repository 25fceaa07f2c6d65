"""Where a forward pass leaves a float32 run: the op at which it happens, and neither what follows nor noise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mezzo.report import Finding
from mezzo.report.numbers import Numbers
from mezzo.torch import autocast, explain, set_precision
from mezzo.torch.recording.recorded import RecordedOp

from .made import kinds, only, op


class Spread(nn.Module):
    """The mean of squares minus the square of the mean, whose digits cancel."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        return (x * x).mean(1, keepdim=True) - mean * mean


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.spread, self.head = nn.Linear(8, 64), Spread(), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x) + 30
        return self.head(h - 30) * self.spread(h)


def found(model: nn.Module, *, steps: int = 1) -> list[Finding]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with explain(model=model, shadow=True) as explained:
        for _ in range(steps):
            with autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(4, 8)).float().square().mean()
            loss.backward()
            optimizer.step()
    return [one for one in explained.report.warnings if one.kind == "far from float32"]


def test_a_variance_that_cancels_is_found_at_the_difference_and_cured_by_its_advice() -> None:
    torch.manual_seed(0)
    model = Net()
    [finding] = found(model, steps=2)
    assert finding.path == ("spread",)
    assert finding.message.startswith("sub in 'spread' gives float16 that is far from the float32 result, ")
    assert "their digits cancel" in finding.message
    assert finding.advice == "compute it in float32: mezzo.torch.set_precision(model, {'spread': 'fp32'})"
    set_precision(model, {"spread": "fp32"})
    assert found(model) == []


def test_a_model_whose_digits_are_kept_is_not_found() -> None:
    assert found(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)), steps=2) == []


def numbers(error: float | None, size: float = 1.0, inf: int = 0) -> Numbers:
    return Numbers(512, size, size, inf=inf, error=error)


def pair(
    before: float | None,
    after: float | None,
    *,
    size: float = 1.0,
    name: str = "sub",
    phase: str = "forward",
    first: Callable[[int], RecordedOp] | None = None,
) -> list[RecordedOp]:
    """Make an op and one that takes its result, with their errors."""
    low = {"came": "float16", "gave": "float16"}
    begin = op("exp", 1, numbers=numbers(before, 100.0), path="body", **low)
    end = op(name, 2, numbers=numbers(after, size), producers=(1,), phase=phase, path="head", **low)
    return [*([first(0)] if first else []), begin, end]


def test_the_op_at_which_the_error_begins_is_named_with_what_goes_in() -> None:
    one = only("far from float32", *pair(0.01, 2.0))
    assert one.message == (
        "sub in 'head' gives float16 that is far from the float32 result, 2 times its size; what goes in is 0.01 away. "
        "Numbers of up to 100 give one of up to 1: their digits cancel"
    )


def step(index: int) -> RecordedOp:
    return op("_fused_sgd_", index, came="float32", gave="float32", phase="optimizer", autocast=None)


@pytest.mark.parametrize(
    "ops",
    [
        pair(0.01, 0.05),
        pair(None, None),
        pair(0.01, 2.0, phase="backward"),
        pair(0.01, float("inf")),
        pair(0.01, 2.0, size=1e-3),
        pair(0.01, 2.0, first=step),
    ],
    ids=["small", "no shadow", "backward", "not finite", "about 0", "after a step"],
)
def test_no_op_is_far_from_float32_where(ops: list[RecordedOp]) -> None:
    assert "far from float32" not in kinds(*ops)


def test_what_follows_from_an_error_is_not_found() -> None:
    assert only("far from float32", *pair(0.2, 2.0)).path == ("body",)


def test_a_product_of_small_numbers_is_no_cancellation() -> None:
    one = only("far from float32", *pair(0.01, 2.0, size=1e-6, name="mul"))
    assert "cancel" not in one.message
