"""On a real GPU: modules and ops by value and dtype, also what fake tensors cannot run (cuDNN, cells, grid_sample)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.torch import autocast
from tests.torch.op_calls import CALLS, NOT_ON_FAKE_TENSORS, Call, Maker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning"),
]

DEVICE = "cuda"
LOW = (torch.float16, torch.bfloat16)
low_dtypes = pytest.mark.parametrize("dtype", LOW, ids=str)
# Of the largest value: the last bit of a low-precision sum in another order; and rounding through ten chained ops.
SAME_KERNELS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.fixture(autouse=True)
def _plain_float32_and_fixed_algorithms() -> Iterator[None]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cudnn.deterministic, matmul.allow_tf32
    cudnn.allow_tf32, cudnn.deterministic, matmul.allow_tf32 = False, True, False
    yield
    cudnn.allow_tf32, cudnn.deterministic, matmul.allow_tf32 = before


def sequence() -> Tensor:
    return torch.randn(5, 4, 16, device=DEVICE)


def row() -> Tensor:
    return torch.randn(4, 16, device=DEVICE)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "LSTM": (lambda: nn.LSTM(16, 32, 2), sequence),
    "GRU": (lambda: nn.GRU(16, 32, bidirectional=True), sequence),
    "RNN": (lambda: nn.RNN(16, 32), sequence),
    "LSTMCell": (lambda: nn.LSTMCell(16, 32), row),
    "GRUCell": (lambda: nn.GRUCell(16, 32), row),
    "RNNCell": (lambda: nn.RNNCell(16, 32), row),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0), sequence),
    "Conv-BatchNorm": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3)),
        lambda: torch.randn(8, 3, 16, 16, device=DEVICE),
    ),
    "ConvTranspose": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()),
        lambda: torch.randn(4, 3, 8, 8, device=DEVICE),
    ),
}
modules = pytest.mark.parametrize(("make", "inputs"), MODULES.values(), ids=MODULES)


def run(make: Callable[[], nn.Module], inputs: Callable[[], Tensor], region: Any) -> list[Tensor]:
    """Give the output and the parameters' gradients of one step."""
    torch.manual_seed(0)
    module, x = make().to(DEVICE), inputs()
    with region:
        output = first(module(x))
    (output.float() * torch.randn(output.shape, device=DEVICE)).sum().backward()
    return [output.detach(), *(parameter.grad for parameter in module.parameters())]


def assert_near(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.isfinite(one).all()
        bound = tolerance * max(other.abs().max().item(), 1e-3)
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=bound)


@modules
@low_dtypes
@pytest.mark.parametrize("policy", [None, "torch"])
def test_without_a_policy_modules_give_pytorchs_numbers(
    make: Callable[[], nn.Module], inputs: Callable[[], Tensor], dtype: torch.dtype, policy: str | None
) -> None:
    got = run(make, inputs, autocast(DEVICE, dtype=dtype, policy=policy))
    expected = run(make, inputs, torch.autocast(DEVICE, dtype=dtype))
    assert [one.dtype for one in got] == [one.dtype for one in expected]
    assert_near(got, expected, SAME_KERNELS[dtype])


@modules
@low_dtypes
def test_under_unified_modules_are_float32s_to_rounding(
    make: Callable[[], nn.Module], inputs: Callable[[], Tensor], dtype: torch.dtype
) -> None:
    got = run(make, inputs, autocast(DEVICE, dtype=dtype, policy="unified"))
    assert all(gradient.dtype is torch.float32 for gradient in got[1:])
    assert_near(got, run(make, inputs, torch.autocast(DEVICE, enabled=False)), ROUNDING[dtype])


@modules
@low_dtypes
def test_under_fp32_modules_run_in_float32(
    make: Callable[[], nn.Module], inputs: Callable[[], Tensor], dtype: torch.dtype
) -> None:
    """An LSTM too, whose cuDNN kernel PyTorch would run in float16 whatever the region says."""
    got = run(make, inputs, autocast(DEVICE, dtype=dtype, policy="fp32"))
    assert got[0].dtype is torch.float32
    assert_near(got, run(make, inputs, torch.autocast(DEVICE, enabled=False)), SAME_KERNELS[torch.float32])


@low_dtypes
@pytest.mark.parametrize("policy", [None, "unified", "fp32"])
def test_grid_sample(dtype: torch.dtype, policy: str | None) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 8, 8, device=DEVICE, requires_grad=True)
    grid = torch.rand(2, 8, 8, 2, device=DEVICE) * 2 - 1
    with autocast(DEVICE, dtype=dtype, policy=policy):
        output = F.grid_sample(image.to(dtype), grid, align_corners=False)
    expected = F.grid_sample(image.detach().to(dtype).float(), grid, align_corners=False)
    assert output.dtype is torch.float32
    assert_near([output.detach()], [expected], SAME_KERNELS[torch.float32])
    output.sum().backward()
    assert torch.isfinite(image.grad).all()


def calls_on_both(call: Call, given: torch.dtype, low: torch.dtype, policy: str) -> list[Tensor]:
    with autocast(DEVICE, dtype=low, policy=policy), autocast("cpu", dtype=low, policy=policy):
        return [call(Maker(device, given)) for device in (DEVICE, "cpu")]


@pytest.mark.parametrize("call", [*CALLS.values(), *NOT_ON_FAKE_TENSORS.values()], ids=[*CALLS, *NOT_ON_FAKE_TENSORS])
@low_dtypes
@pytest.mark.parametrize("policy", ["unified", "fp32"])
def test_a_policy_means_the_same_dtypes_and_values_on_gpu_and_cpu(call: Call, dtype: torch.dtype, policy: str) -> None:
    for given in (torch.float32, dtype):
        on_gpu, on_cpu = calls_on_both(call, given, dtype, policy)
        assert on_gpu.dtype is on_cpu.dtype
        assert_near([on_gpu.cpu()], [on_cpu], SAME_KERNELS[on_cpu.dtype if on_cpu.dtype in SAME_KERNELS else dtype])


@low_dtypes
def test_binary_cross_entropy_is_banned_but_under_fp32(dtype: torch.dtype) -> None:
    half = torch.full((4,), 0.5, device=DEVICE, dtype=dtype)
    for policy in (None, "unified"):
        with (
            autocast(DEVICE, dtype=dtype, policy=policy),
            pytest.raises(RuntimeError, match="unsafe to autocast"),
        ):
            F.binary_cross_entropy(half, half)
    with autocast(DEVICE, dtype=dtype, policy="fp32"):
        loss = F.binary_cross_entropy(half, half)
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(0.6931472, rel=1e-6)
