"""Modules of `torch.nn` in mezzo's regions: PyTorch's numbers without a policy, float32's to rounding with one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import autocast

LOW = (torch.bfloat16, torch.float16)
# Rounding of one op: 2^-8 in bfloat16, 2^-11 in float16. A module chains some ten of them; errors are taken relative to
# the largest value of a tensor.
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3}
low_dtypes = pytest.mark.parametrize("dtype", LOW, ids=str)
pytestmark = pytest.mark.filterwarnings(
    "ignore:LSTM with projections is not supported with oneDNN:UserWarning"  # said once, and true of all of them
)


class Case(NamedTuple):
    """A module, its inputs, and which part of its output is looked at."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    pick: Callable[[Any], Tensor] = lambda output: output


def sequence() -> tuple[Tensor, ...]:
    return (torch.randn(5, 2, 8),)


def first(output: Any) -> Tensor:
    return output[0]


CASES = {
    "LSTM": Case(lambda: nn.LSTM(8, 16, 2), sequence, first),
    "LSTM-projected": Case(lambda: nn.LSTM(8, 16, proj_size=4), sequence, first),
    "GRU": Case(lambda: nn.GRU(8, 16, bidirectional=True), sequence, first),
    "RNN": Case(lambda: nn.RNN(8, 16), sequence, first),
    "LSTMCell": Case(lambda: nn.LSTMCell(8, 16), lambda: (torch.randn(2, 8),), first),
    "GRUCell": Case(lambda: nn.GRUCell(8, 16), lambda: (torch.randn(2, 8),)),
    "RNNCell": Case(lambda: nn.RNNCell(8, 16), lambda: (torch.randn(2, 8),)),
    "MultiheadAttention": Case(
        lambda: nn.MultiheadAttention(16, 4, batch_first=True), lambda: (torch.randn(2, 5, 16),) * 3, first
    ),
    "TransformerEncoderLayer": Case(
        lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
        lambda: (torch.randn(2, 5, 16),),
    ),
    "Conv-BatchNorm": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(288, 4)
        ),
        lambda: (torch.randn(8, 3, 8, 8),),
    ),
    "EmbeddingBag": Case(
        lambda: nn.Sequential(nn.EmbeddingBag(20, 16), nn.Linear(16, 4)),
        lambda: (torch.randint(0, 20, (3, 6)),),
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


class Result(NamedTuple):
    output: Tensor
    gradients: list[Tensor]
    module: nn.Module


def run(case: Case, region: Any, *, train: bool) -> Result:
    torch.manual_seed(0)
    module = case.make().train(train)
    inputs = case.inputs()
    with nullcontext() if train else torch.no_grad():
        with region:
            output = case.pick(module(*inputs))
    if not train:
        return Result(output, [], module)
    # Random weights, so that no normalization makes the gradient vanish.
    (output.float() * torch.randn(output.shape)).sum().backward()
    return Result(output.detach(), [parameter.grad for parameter in module.parameters()], module)


def skip_where_pytorch_cannot(case: Case, dtype: torch.dtype, *, train: bool) -> None:
    """Skip the LSTM of oneDNN in float16 where ``torch.autocast`` raises: on some CPUs always, on some in training."""
    if case is CASES["LSTM"] and dtype is torch.float16:
        try:
            run(case, torch.autocast("cpu", dtype=dtype), train=train)
        except RuntimeError as error:
            pytest.skip(f"torch.autocast cannot run it on this CPU: {str(error)[:60]}")


def assert_close(got: Tensor, reference: Tensor, tolerance: float) -> None:
    assert torch.isfinite(got).all()
    bound = tolerance * reference.abs().max().item()
    torch.testing.assert_close(got.float(), reference, rtol=0, atol=bound)


@cases
@low_dtypes
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("policy", [None, "torch"])
def test_without_a_policy_numbers_are_pytorchs(case: Case, dtype: torch.dtype, train: bool, policy: str | None) -> None:
    skip_where_pytorch_cannot(case, dtype, train=train)
    expected = run(case, torch.autocast("cpu", dtype=dtype), train=train)
    got = run(case, autocast("cpu", dtype=dtype, policy=policy), train=train)
    assert got.output.dtype is expected.output.dtype
    assert torch.equal(got.output, expected.output)
    for one, other in zip(got.gradients, expected.gradients, strict=True):
        assert one.dtype is other.dtype is torch.float32
        assert torch.equal(one, other)


@cases
@low_dtypes
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_under_unified_numbers_are_float32s_to_rounding(case: Case, dtype: torch.dtype, train: bool) -> None:
    skip_where_pytorch_cannot(case, dtype, train=train)
    reference = run(case, torch.autocast("cpu", enabled=False), train=train)
    got = run(case, autocast("cpu", dtype=dtype, policy="unified"), train=train)
    assert_close(got.output, reference.output, TOLERANCE[dtype])
    assert not torch.equal(got.output.float(), reference.output)
    for one, other in zip(got.gradients, reference.gradients, strict=True):
        assert one.dtype is torch.float32
        assert_close(one, other, TOLERANCE[dtype])


@cases
@low_dtypes
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_under_fp32_a_module_runs_in_float32(case: Case, dtype: torch.dtype, train: bool) -> None:
    reference = run(case, torch.autocast("cpu", enabled=False), train=train)
    got = run(case, autocast("cpu", dtype=dtype, policy="fp32"), train=train)
    assert got.output.dtype is torch.float32
    # Float32 against float32: other kernels may add up in another order, nothing more.
    assert_close(got.output, reference.output, 1e-5)
    for one, other in zip(got.gradients, reference.gradients, strict=True):
        assert one.dtype is torch.float32
        assert_close(one, other, 1e-5)


@low_dtypes
@pytest.mark.parametrize("policy", [None, "torch", "unified", "fp32"])
def test_running_statistics_are_updated(dtype: torch.dtype, policy: str | None) -> None:
    case = CASES["Conv-BatchNorm"]
    norm = run(case, autocast("cpu", dtype=dtype, policy=policy), train=True).module[1]
    reference = run(case, torch.autocast("cpu", enabled=False), train=True).module[1]
    assert norm.num_batches_tracked.item() == 1
    assert norm.running_mean.dtype is norm.running_var.dtype is torch.float32
    assert norm.running_mean.abs().max() > 1e-3
    assert_close(norm.running_mean, reference.running_mean, TOLERANCE[dtype])
    assert_close(norm.running_var, reference.running_var, TOLERANCE[dtype])


def _logits() -> Tensor:
    return torch.randn(6, 5)


def _classes() -> Tensor:
    return torch.randint(0, 5, (6,))


LOSSES: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
    "CrossEntropy": (nn.CrossEntropyLoss(label_smoothing=0.1), _classes),
    "CrossEntropy-probabilities": (nn.CrossEntropyLoss(), lambda: _logits().softmax(-1)),
    "MultiMargin": (nn.MultiMarginLoss(), _classes),
    "BCEWithLogits": (nn.BCEWithLogitsLoss(), lambda: torch.rand(6, 5)),
    "MSE": (nn.MSELoss(), _logits),
    "L1": (nn.L1Loss(), _logits),
    "SmoothL1": (nn.SmoothL1Loss(), _logits),
    "Huber": (nn.HuberLoss(), _logits),
    "KLDiv": (nn.KLDivLoss(reduction="batchmean"), lambda: _logits().softmax(-1)),
    "PoissonNLL": (nn.PoissonNLLLoss(), lambda: torch.rand(6, 5)),
    "SoftMargin": (nn.SoftMarginLoss(), lambda: _logits().sign()),
}


def loss_and_gradient(
    loss: nn.Module, target: Callable[[], Tensor], region: Any, input_dtype: torch.dtype
) -> list[Tensor]:
    torch.manual_seed(0)
    logits = _logits().to(input_dtype).requires_grad_()
    goal = target()
    with region:
        value = loss(logits, goal)
    value.backward()
    return [value.detach(), logits.grad]


@pytest.mark.parametrize(("loss", "target"), LOSSES.values(), ids=LOSSES)
@low_dtypes
@pytest.mark.parametrize("policy", [None, "torch"])
def test_without_a_policy_losses_are_pytorchs(
    loss: nn.Module, target: Callable[[], Tensor], dtype: torch.dtype, policy: str | None
) -> None:
    expected = loss_and_gradient(loss, target, torch.autocast("cpu", dtype=dtype), dtype)
    got = loss_and_gradient(loss, target, autocast("cpu", dtype=dtype, policy=policy), dtype)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(("loss", "target"), LOSSES.values(), ids=LOSSES)
@low_dtypes
@pytest.mark.parametrize("policy", ["unified", "fp32"])
def test_losses_of_low_precision_logits_are_float32(
    loss: nn.Module, target: Callable[[], Tensor], dtype: torch.dtype, policy: str
) -> None:
    value, gradient = loss_and_gradient(loss, target, autocast("cpu", dtype=dtype, policy=policy), dtype)
    torch.manual_seed(0)
    logits = _logits().to(dtype).float().requires_grad_()
    reference = loss(logits, target())
    reference.backward()
    assert value.dtype is torch.float32
    # The loss itself is computed in float32 from the rounded logits; only its gradient is rounded, once.
    torch.testing.assert_close(value, reference.detach(), rtol=1e-5, atol=1e-6)
    assert gradient.dtype is dtype
    assert_close(gradient, logits.grad, TOLERANCE[dtype] / 4)
