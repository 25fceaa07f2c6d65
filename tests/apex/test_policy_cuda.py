"""The policy "apex-o1" on CUDA by dtype, on fake tensors that PyTorch takes for CUDA's, and beside PyTorch's own list.

Fake tensors carry no values, and here no gradients: a build without CUDA cannot make their autograd nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from mezzo import CastPolicy, builtin_policy, tables
from mezzo.torch.plans import build_plan
from mezzo.torch.policies import policy_on

from .o1_calls import Make, call, forms
from .o1_checks import NO_DTYPE, ON_THE_RIGHT
from .o1_lists import IN_PLACE
from .test_policy_unlisted import INSIDE, NO_LOW_KERNEL, UNLISTED

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
low_dtypes = pytest.mark.parametrize("low", [F16, BF16], ids=str)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU shows the real thing")

NOT_ON_FAKE = {
    "equal": "gives a Python value, which a fake tensor does not have",
    "grid_sample": "asks cuDNN how to run",
    "ctc_loss": "asks cuDNN how to run",
    "cpu": "leaves the device, and keeps its dtype",
    "__ipow__": "keeps its dtype",
}

MENDED_IN_REGIONS = ("dot", "bilinear")
"""PyTorch's own kernel promotes these, not to float64; a region of mezzo's mends that, and this is no whole region."""

NOT_ON_FAKE_UNLISTED = ("_sparse_addmm", "_sparse_mm", "corrcoef", "cov")
"""Fake tensors are not sparse, and the last two look at values."""


def cases(*kinds: str) -> pytest.MarkDecorator:
    found = [form for form in forms(*kinds) if form[1] not in (*NOT_ON_FAKE, *IN_PLACE)]
    return pytest.mark.parametrize(("home", "name"), found, ids=[".".join(form) for form in found])


@contextmanager
def cuda_region(low: torch.dtype, policy: str = "apex-o1") -> Iterator[None]:
    """Set the state of a CUDA region by hand; ``torch.autocast("cuda")`` would disable itself on this machine."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", low)
    try:
        with FakeTensorMode(), torch.no_grad(), policy_on("cuda", policy):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def dtype_of(home: str, name: str, first: torch.dtype, rest: torch.dtype, *, zero_dim: bool = False) -> torch.dtype:
    makers = Make(first, "cuda", fill=False), Make(rest, "cuda", fill=False, zero_dim=zero_dim)
    result: Tensor = call(home, name, *makers)
    assert result.device.type == "cuda"
    return result.dtype


@no_gpu
@low_dtypes
@cases("FP16")
def test_the_fp16_list_is_low_on_cuda(home: str, name: str, low: torch.dtype) -> None:
    with cuda_region(low):
        found = {dtype_of(home, name, first, rest) for first in (F32, low) for rest in (F32, low)}
        assert dtype_of(home, name, F64, F64) is F64
    assert found == {low}


@no_gpu
@low_dtypes
@cases("FP32")
def test_the_fp32_list_is_float32_on_cuda(home: str, name: str, low: torch.dtype) -> None:
    with cuda_region(low):
        found = {dtype_of(home, name, first, rest) for first in (F32, low) for rest in (F32, low)}
        assert dtype_of(home, name, F64, F64) is F64
    assert found == {F32}


@no_gpu
@low_dtypes
@cases("CASTS", "SEQUENCE_CASTS")
def test_the_promote_lists_promote_on_cuda(home: str, name: str, low: torch.dtype) -> None:
    own = F32 if name in ("__rdiv__", "__rtruediv__") else low
    mixed = own if home == "operator" and name in ON_THE_RIGHT else F32
    wide = low if name not in MENDED_IN_REGIONS else F64
    with cuda_region(low):
        found = [dtype_of(home, name, *dtypes) for dtypes in ((F32, F32), (low, low), (low, F32), (F64, wide))]
    assert found == ([torch.bool] * 4 if name in NO_DTYPE else [F32, own, mixed, F64])


@no_gpu
@low_dtypes
@pytest.mark.parametrize("op", ["grid_sampler", "ctc_loss.IntList", "ctc_loss.Tensor", "lstm.input", "gru.data"])
def test_what_asks_cudnn_how_to_run_is_served_by_mezzo_on_cuda(op: str, low: torch.dtype) -> None:
    """PyTorch's own table promotes the first and does not have the others."""
    plan = build_plan(builtin_policy("apex-o1"), "cuda")
    served = (plan.float16 if low is F16 else plan.bfloat16)[f"aten::{op}"]
    assert served.rule is builtin_policy("apex-o1").ops[f"aten::{op}"]


@no_gpu
@low_dtypes
@pytest.mark.parametrize("name", ["add", "mul", "div", "atan2", "addcmul", "addcdiv"])
def test_a_number_in_a_float32_tensor_counts_as_float32_on_cuda(name: str, low: torch.dtype) -> None:
    with cuda_region(low):
        assert dtype_of("torch", name, low, F32, zero_dim=True) is F32
    # These three are on PyTorch's own list, too.
    natively = F32 if name in ("atan2", "addcmul", "addcdiv") else low
    with cuda_region(low, "torch"):
        assert dtype_of("torch", name, low, F32, zero_dim=True) is natively


@no_gpu
@low_dtypes
def test_the_ban_holds_on_cuda(low: torch.dtype) -> None:
    with cuda_region(low):
        x = Make(low, "cuda", fill=False)(4)
        # PyTorch's own kernel raises.
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(x, x)


@no_gpu
@low_dtypes
@pytest.mark.parametrize("name", [name for name in {**UNLISTED, **INSIDE} if name not in NOT_ON_FAKE_UNLISTED])
def test_what_is_not_listed_runs_in_the_dtype_that_comes_in_on_cuda(name: str, low: torch.dtype) -> None:
    call_unlisted = {**UNLISTED, **INSIDE}[name]
    for dtype in (F32, F64, low):
        if dtype is low and name.startswith(NO_LOW_KERNEL):
            continue
        with cuda_region(low):
            assert call_unlisted(Make(dtype, "cuda", fill=False)).dtype is dtype


# How the lists differ from those that PyTorch 2.13 has for CUDA. What is in neither is on both, with the same effect.

ONLY_IN_APEX = {
    CastPolicy.LOWER_PRECISION_FP: {
        # PyTorch lists the kernels inside of these.
        *("conv1d.padding", "conv2d.padding", "conv3d.padding", "gru.data", "gru.input", "lstm.data", "lstm.input"),
        *("rnn_relu.data", "rnn_relu.input", "rnn_tanh.data", "rnn_tanh.input"),
        # Overloads that are newer than Apex.
        *("addmm.dtype", "baddbmm.dtype", "bmm.dtype", "mm.dtype"),
        # Attention in one piece, on PyTorch's list for the CPU; under autocast it is not taken on CUDA.
        *("_native_multi_head_attention", "_addmm_activation"),
    },
    CastPolicy.FP32: {
        *("gelu", "grid_sampler", "std", "std.dim", "std.correction", "var", "var.dim", "var.correction"),
        *("ctc_loss.IntList", "ctc_loss.Tensor"),
        # PyTorch lists the ops inside.
        "cross_entropy_loss",
        # A newer mode of interpolate.
        "_upsample_lanczos2d_aa",
    },
    CastPolicy.PROMOTE: {
        *("add.Tensor", "div.Tensor", "div.Tensor_mode", "mul.Tensor", "rsub.Tensor", "sub.Tensor"),
        *("eq.Tensor", "ge.Tensor", "gt.Tensor", "le.Tensor", "lt.Tensor", "ne.Tensor", "equal"),
        # On PyTorch's page; the ops themselves promote.
        *("cat", "stack"),
    },
    CastPolicy.BANNED_LOWER_PRECISION: {"binary_cross_entropy"},
}
ONLY_IN_PYTORCH = {
    CastPolicy.LOWER_PRECISION_FP: {
        *("einsum", "chain_matmul", "linalg_multi_dot", "linalg_vecdot", "scaled_dot_product_attention"),
        # Kernels that listed functions call.
        *("_convolution", "_convolution.deprecated", "convolution", "cudnn_convolution", "cudnn_convolution_transpose"),
        *("_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"),
    },
    CastPolicy.FP32: {
        *("log1p", "rms_norm", "huber_loss", "pdist", "cdist", "logsumexp", "linalg_matrix_norm", "native_layer_norm"),
    },
    CastPolicy.PROMOTE: {"vdot", "grid_sampler", "index_put", "tensordot", "scatter_add"},
    # Whatever dtype comes in.
    CastPolicy.BANNED: {"binary_cross_entropy"},
}


def kind(rule: object) -> CastPolicy:
    named = CastPolicy(str(rule))
    return CastPolicy.FP32 if named.startswith("fp32") else named


def test_the_lists_differ_from_pytorchs_by_just_these() -> None:
    apex = {op: kind(rule) for op, rule in builtin_policy("apex-o1").ops.items() if rule is not CastPolicy.FALLTHROUGH}
    cuda = {op: kind(rule) for op, rule in tables.device_table("cuda").items()}
    for expected, mine, other in ((ONLY_IN_APEX, apex, cuda), (ONLY_IN_PYTORCH, cuda, apex)):
        found: dict[CastPolicy, set[str]] = {}
        for op, rule in mine.items():
            if other.get(op) is not rule:
                found.setdefault(rule, set()).add(op.removeprefix("aten::"))
        assert found == expected
