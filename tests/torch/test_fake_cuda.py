"""CUDA's rules without a GPU: the page's CUDA examples by dtype, on fake tensors that PyTorch takes for CUDA's.

Fake tensors carry no values, and here no gradients: a build without CUDA cannot make their autograd nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mezzo
from mezzo.errors import BannedOpError
from mezzo.policy import Policy
from mezzo.torch import active_policy, autocast
from mezzo.torch.policies import policy_on
from tests.torch.op_calls import CALLS, Call, Maker

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU shows the real thing: test_gpu.py")

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
low_dtypes = pytest.mark.parametrize("low", [F16, BF16], ids=str)
native_like = pytest.mark.parametrize("policy", ["torch", "unified"])


@pytest.fixture(autouse=True)
def _fake_tensors() -> Iterator[None]:
    with FakeTensorMode(), torch.no_grad():
        yield


@contextmanager
def cuda_region(low: torch.dtype = F16, *, enabled: bool = True) -> Iterator[None]:
    """Set the state of a CUDA region by hand; ``torch.autocast("cuda")`` would disable itself on this machine."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", low)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def cuda(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def square(dtype: torch.dtype = F32) -> Tensor:
    return cuda(4, 4, dtype=dtype)


@low_dtypes
@native_like
def test_products_of_float32_and_of_mixed_inputs_are_low(low: torch.dtype, policy: str) -> None:
    """The page: mm of two float32 gives float16, mm of float32 and float16 too, and .float() outside."""
    with cuda_region(low), policy_on("cuda", policy):
        e = torch.mm(square(), square())
        f = torch.mm(square(), e)
    assert (e.dtype, f.dtype) == (low, low)
    assert torch.mm(square(), f.float()).dtype is F32


@native_like
def test_nested_disabled_region(policy: str) -> None:
    with cuda_region(), policy_on("cuda", policy):
        low = torch.mm(square(), square())
        with cuda_region(enabled=False):
            assert torch.mm(square(), low.float()).dtype is F32
        assert torch.mm(square(), square()).dtype is F16


def test_decorated_forward_in_both_dtypes() -> None:
    @cuda_region(BF16)
    def forward(x: Tensor) -> Tensor:
        return F.linear(x, square())

    assert forward(square()).dtype is BF16
    with cuda_region(F16):
        assert forward(square()).dtype is BF16
        assert F.linear(square(), square()).dtype is F16
    assert F.linear(square(), square()).dtype is F32


def test_training_forward_and_loss_have_the_pages_dtypes() -> None:
    """The page's CUDA training loop up to the loss: the output is float16, the loss float32."""
    images, weight, target = cuda(2, 3, 8, 8), cuda(4, 3, 3, 3), cuda(2, dtype=torch.int64)
    with cuda_region():
        features = F.relu(F.conv2d(images, weight)).flatten(1)
        output = F.linear(features, cuda(10, 4 * 36), cuda(10))
        loss = F.cross_entropy(output, target)
    assert (features.dtype, output.dtype, loss.dtype) == (F16, F16, F32)


# Each op with float16 inputs where it is on the float32 list and float32 inputs where it is on the float16 list, so a
# table that does nothing fails.
LOWER: dict[str, Callable[[], Tensor]] = {
    "matmul": lambda: square() @ square(),
    "addmm": lambda: torch.addmm(square(), square(), square()),
    "baddbmm": lambda: torch.baddbmm(cuda(2, 4, 4), cuda(2, 4, 4), cuda(2, 4, 4)),
    "mv": lambda: torch.mv(square(), cuda(4)),
    "einsum": lambda: torch.einsum("ij,jk->ik", square(), square()),
    "chain_matmul": lambda: torch.linalg.multi_dot([square(), square(), square()]),
    "linear": lambda: F.linear(square(), square(), cuda(4)),
    "conv1d": lambda: F.conv1d(cuda(1, 3, 8), cuda(4, 3, 3)),
    "conv_transpose2d": lambda: F.conv_transpose2d(cuda(1, 3, 8, 8), cuda(3, 4, 3, 3)),
    "prelu": lambda: F.prelu(square(), cuda(1)),
    "attention": lambda: F.scaled_dot_product_attention(cuda(1, 2, 4, 8), cuda(1, 2, 4, 8), cuda(1, 2, 4, 8)),
    "LSTMCell": lambda: torch.lstm_cell(cuda(2, 4), [cuda(2, 4)] * 2, cuda(16, 4), cuda(16, 4), cuda(16), cuda(16))[0],
    "RNNCell": lambda: torch.rnn_tanh_cell(cuda(2, 4), cuda(2, 4), square(), square(), cuda(4), cuda(4)),
}
FULL: dict[str, Callable[[], Tensor]] = {
    "pow": lambda: square(F16) ** 2,
    "rpow": lambda: 2 ** square(F16),
    "reciprocal": lambda: 1 / square(F16),
    "exp": lambda: square(F16).exp(),
    "softmax": lambda: square(F16).softmax(-1),
    "log_softmax": lambda: F.log_softmax(square(F16), -1),
    "layer_norm": lambda: F.layer_norm(square(F16), (4,)),
    "group_norm": lambda: F.group_norm(cuda(2, 4, 3, dtype=F16), 2),
    "norm": lambda: square(F16).norm(),
    "norm.Scalar": lambda: torch.ops.aten.norm.Scalar(square(F16)),
    "sum": lambda: square(F16).sum(),
    "prod": lambda: square(F16).prod(0),
    "cumsum": lambda: square(F16).cumsum(0),
    "cosine_similarity": lambda: F.cosine_similarity(square(F16), square(F16)),
    "mse_loss": lambda: F.mse_loss(square(F16), square(F16)),
    "nll_loss": lambda: F.nll_loss(square(F16), cuda(4, dtype=torch.int64)),
}
PROMOTE: dict[str, Callable[[], Tensor]] = {
    "addcmul": lambda: torch.addcmul(square(F16), square(F32), square(F16)),
    "bilinear": lambda: F.bilinear(square(F16), square(F16), cuda(2, 4, 4), None),
    "cat": lambda: torch.cat([square(F32), square(F16)]),
    "dot": lambda: torch.dot(cuda(4, dtype=F16), cuda(4)),
    "stack": lambda: torch.stack([square(F32), square(F16)]),
    "index_put": lambda: square(F32).index_put([cuda(2, dtype=torch.int64)], cuda(4, dtype=F16)),
}


@pytest.mark.parametrize("call", LOWER.values(), ids=LOWER)
@native_like
@low_dtypes
def test_ops_on_the_float16_list(call: Callable[[], Tensor], policy: str, low: torch.dtype) -> None:
    with cuda_region(low), policy_on("cuda", policy):
        assert call().dtype is low
    with policy_on("cuda", policy):
        assert call().dtype is F32


@pytest.mark.parametrize("call", [*FULL.values(), *PROMOTE.values()], ids=[*FULL, *PROMOTE])
@pytest.mark.parametrize("policy", ["torch", "unified", "fp32"])
def test_ops_on_the_float32_and_widest_lists(call: Callable[[], Tensor], policy: str) -> None:
    with cuda_region(), policy_on("cuda", policy):
        assert call().dtype is F32


@pytest.mark.parametrize("call", LOWER.values(), ids=LOWER)
@low_dtypes
def test_fp32_lifts_the_float16_list(call: Callable[[], Tensor], low: torch.dtype) -> None:
    with cuda_region(low), policy_on("cuda", "fp32"):
        assert call().dtype is F32


def dtypes_on_both(call: Call, given: torch.dtype, low: torch.dtype, policy: str) -> list[torch.dtype]:
    with cuda_region(low), policy_on("cuda", policy), autocast("cpu", dtype=low, policy=policy):
        results = [call(Maker(device, given, fill=False)) for device in ("cuda", "cpu")]
    assert [result.device.type for result in results] == ["cuda", "cpu"]
    return [result.dtype for result in results]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("policy", ["unified", "fp32"])
@low_dtypes
def test_a_policy_means_the_same_dtypes_on_cuda_and_cpu(call: Call, policy: str, low: torch.dtype) -> None:
    for given in (F32, low):
        on_cuda, on_cpu = dtypes_on_both(call, given, low, policy)
        assert on_cuda is on_cpu


# "unified" leaves these to PyTorch's kernel where its rule is the same, and that one raises where a float16 tensor meets a
# bfloat16 region.
PROMOTED_BY_PYTORCH = {"addcmul", "addcdiv", "bilinear", "stack", "dot"}


@pytest.mark.parametrize("name", sorted(set(CALLS) - PROMOTED_BY_PYTORCH))
@low_dtypes
def test_the_other_low_dtype_goes_the_same_way_on_cuda_and_cpu(name: str, low: torch.dtype) -> None:
    on_cuda, on_cpu = dtypes_on_both(CALLS[name], BF16 if low is F16 else F16, low, "unified")
    assert on_cuda is on_cpu


@pytest.mark.parametrize("policy", ["torch", "unified", "fp32"])
def test_float64_and_unlisted_ops_are_left_alone(policy: str) -> None:
    with cuda_region(), policy_on("cuda", policy):
        assert torch.mm(square(F64), square(F64)).dtype is F64
        assert F.gelu(square(F16)).dtype is F16
        assert (square(F16) + square(BF16)).dtype is F32
        assert square(F16).sum(dtype=F16).dtype is F16


@native_like
def test_binary_cross_entropy_is_banned_with_pytorchs_words(policy: str) -> None:
    with cuda_region(), policy_on("cuda", policy):
        with pytest.raises(RuntimeError, match="are unsafe to autocast"):
            F.binary_cross_entropy(square(F16), square(F16))


def test_fp32_lifts_the_ban() -> None:
    with cuda_region(), policy_on("cuda", "fp32"):
        assert F.binary_cross_entropy(square(F16), square(F16)).dtype is F32


def test_override_takes_softmax_to_the_low_dtype() -> None:
    keep = mezzo.builtin_policy("unified").override({"softmax": "lower_precision_fp"})
    with cuda_region():
        with policy_on("cuda", keep):
            assert active_policy("cuda") == keep
            assert square(F32).softmax(-1).dtype is F16
            assert F.log_softmax(square(F16), -1).dtype is F32
        assert active_policy("cuda").name == "torch"
        assert square(F32).softmax(-1).dtype is F32


def test_override_by_dtype_of_the_region() -> None:
    careful = mezzo.builtin_policy("unified").override({"mm": {"bfloat16": "lower_precision_fp", "float16": "fp32"}})
    with policy_on("cuda", careful):
        with cuda_region(BF16):
            assert torch.mm(square(), square()).dtype is BF16
        with cuda_region(F16):
            assert torch.mm(square(), square()).dtype is F32


def test_ban_of_a_policys_own() -> None:
    strict = Policy("strict", {"exp": "banned"}, default="device")
    with cuda_region(), policy_on("cuda", strict):
        with pytest.raises(BannedOpError, match="aten::exp is banned by the policy 'strict'"):
            square(F16).exp()
        assert torch.mm(square(), square()).dtype is F16


def test_a_policy_rules_only_the_device_it_is_set_for() -> None:
    with cuda_region(), policy_on("cuda", "fp32"):
        torch.set_autocast_enabled("cpu", True)
        try:
            assert torch.mm(torch.empty(4, 4), torch.empty(4, 4)).dtype is BF16
            assert torch.mm(square(), square()).dtype is F32
        finally:
            torch.set_autocast_enabled("cpu", False)


def test_a_policy_without_an_enabled_region_changes_nothing() -> None:
    with policy_on("cuda", mezzo.builtin_policy("unified").override({"add.Tensor": "lower_precision_fp"})):
        assert (square() + square()).dtype is F32
        with cuda_region():
            assert (square() + square()).dtype is F16
