"""Faults that make nothing non-finite are named by `explain`: float32 that nobody asked for, and gradients that are 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mezzo.report import Finding
from mezzo.torch import autocast, explain

from .planted import BOTH
from .transformer import TOKENS, Transformer


@torch.library.custom_op("planted::soft_sign", mutates_args=())
def soft_sign(x: Tensor) -> Tensor:
    wide = x.float()
    return wide / (1 + wide.abs())


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return (gradient.float() / (1 + x.float().abs()).square()).to(x.dtype)


soft_sign.register_autograd(_backward, setup_context=_keep)


class SoftSign(nn.Module):
    def __init__(self, *, rounded: bool) -> None:
        super().__init__()
        self.rounded = rounded

    def forward(self, x: Tensor) -> Tensor:
        result = soft_sign(x)
        return result.to(x.dtype) if self.rounded else result


def findings(model: Transformer, dtype: torch.dtype, kind: str, factor: float = 1.0) -> list[Finding]:
    """Give what a training step's two passes show of a kind."""
    with explain(model=model, numerics=True) as explained:
        with autocast("cpu", dtype=dtype):
            loss = model(TOKENS)
        (loss * factor).backward()
    assert explained.report.notes == ()
    return [finding for region in explained.report.regions for finding in region.findings if finding.kind == kind]


def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_a_custom_op_that_returns_float32_is_named(dtype: torch.dtype) -> None:
    model = transformer()
    model.layers[2].mlp.act = SoftSign(rounded=False)
    (found,) = findings(model, dtype, "float32 memory")
    assert found.path == ("layers.2.mlp.act",)
    assert "planted::soft_sign" in found.message
    assert found.source is not None
    assert found.source.place.startswith("diagnose/test_silent_faults.py:")
    assert f".to(torch.{str(dtype).removeprefix('torch.')})" in found.advice or ".to(x.dtype)" in found.advice


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_a_custom_op_that_rounds_its_result_is_fine(dtype: torch.dtype) -> None:
    model = transformer()
    model.layers[2].mlp.act = SoftSign(rounded=True)
    assert findings(model, dtype, "float32 memory") == []


def test_gradients_that_a_cast_makes_zero_are_named_and_so_is_the_scaler_that_is_missing() -> None:
    (found,) = findings(transformer(), torch.float16, "gradients underflow", factor=1e-7)
    assert found.path == ("loss",)
    assert found.source is not None
    assert found.source.place.startswith("diagnose/transformer.py:")
    assert "GradScaler" in found.advice


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float16, 1024.0), (torch.bfloat16, 1e-7)], ids=["scaled", "in bfloat16"]
)
def test_gradients_that_the_dtype_holds_are_not_named(dtype: torch.dtype, factor: float) -> None:
    assert findings(transformer(), dtype, "gradients underflow", factor) == []
