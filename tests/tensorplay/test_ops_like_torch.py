"""Op by op: the unified policy gives what PyTorch gives under mezzo's unified policy, in the same process."""

from __future__ import annotations

from typing import Any

import pytest
import tensorplay

import mezzo.tensorplay as mt
import mezzo.torch
from mezzo.builtin import builtin_policy
from tests.tensorplay.op_calls import CALLS
from tests.tensorplay.op_peers import peer_of, run_peer, torch_dtype
from tests.tensorplay.op_runs import HALVES, NO_KERNEL, distance, dtype_names, lacks, run

F32 = tensorplay.float32
LISTED = sorted({*builtin_policy("unified", framework="tensorplay").ops} - NO_KERNEL - {"binary_cross_entropy"})
COMPARED = [op for op in LISTED if peer_of(op) is not None]

OTHER_DTYPE = {
    "_ctc_loss": "PyTorch's own kernel, below its listed op, raises on low inputs",
    "_native_multi_head_attention": "low results have no gradient here, so it runs in float32",
    "_scaled_dot_product_attention_math": "low results have no gradient here, so it runs in float32",
    "addmv": "there is no right kernel for low dtypes here, so it runs in float32",
    "grid_sampler_2d": "the public function comes to it here, and to `grid_sampler` in PyTorch, which promotes",
    "grid_sampler_3d": "as `grid_sampler_2d`",
    "gru": "the sum with the float32 state makes PyTorch's result float32; here the whole layer runs low",
    "linalg_pinv": "PyTorch's last product is low; a factor has no low kernel here, so all of it is float32",
    "lstm": "with float16, PyTorch's sums with the float32 state give float32, as in `gru`",
    "matrix_exp": "there is no low kernel here, so it runs in float32",
    "vdot": "the kernel for low inputs gives float32",
}
"""Ops with a call for which the dtype is another, and why."""

OTHER_NUMBERS = {
    "_ctc_loss": "its second result has places that are not filled",
    "linalg_eig": "vectors of any length and sign",
    "linalg_qr": "signs are free, and the lower triangle is not filled, in this release",
    "linalg_svd": "signs are free",
    "ormqr": "the result has another shape in this release",
    "svd": "signs are free",
}
"""Ops whose numbers are not compared, and why."""

MIXES = {"float32": (F32,), "low": (None,), "low first": (None, F32), "float32 first": (F32, None)}
"""The dtypes of float inputs, None for the region's; the last one serves the rest."""


def both(op: str, mix: str, half: Any) -> tuple[list[Any], list[Any]]:
    """Make a call under the unified policy with both frameworks."""
    dtypes = [dtype or half for dtype in MIXES[mix]]
    ours = run(op, dtypes, mt.autocast("cpu", dtype=half, policy="unified"))
    with mezzo.torch.autocast("cpu", dtype=torch_dtype(half), policy="unified"):
        theirs = run_peer(CALLS[op], dtypes)
    return ours, theirs


@pytest.mark.filterwarnings("ignore:torch.(chain_matmul|triangular_solve) is deprecated:UserWarning")
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("op", [op for op in COMPARED if op not in OTHER_DTYPE])
def test_dtypes_and_numbers_are_pytorchs(op: str, half: Any) -> None:
    for mix in MIXES:
        ours, theirs = both(op, mix, half)
        # PyTorch gives some losses without their second result, the total weight.
        assert dtype_names(ours)[: len(theirs)] == dtype_names(theirs), mix
        if op not in OTHER_NUMBERS:
            for mine, right in zip(ours, theirs, strict=False):
                # Both round the result once, and sums and products inside in their own order: a few roundings.
                coarse = "float16" if half == tensorplay.float16 else "bfloat16"
                assert distance(mine, right) <= (16 * 2.0**-8 if coarse == "bfloat16" else 16 * 2.0**-11), mix


@pytest.mark.parametrize("op", [op for op in sorted(OTHER_DTYPE) if peer_of(op) is not None])
def test_the_exceptions_still_are_some(op: str) -> None:
    def differ(mix: str, half: Any) -> bool:
        try:
            ours, theirs = both(op, mix, half)
        except NotImplementedError:
            return True
        return dtype_names(ours)[: len(theirs)] != dtype_names(theirs)

    assert any(differ(mix, half) for mix in MIXES for half in HALVES), OTHER_DTYPE[op]


def test_ops_without_a_peer_are_few_and_known() -> None:
    alone = {op for op in LISTED if peer_of(op) is None}
    assert alone == set(
        "conv2d_relu lstm_cell multilabel_soft_margin_loss native_layer_norm "
        "poisson_nll_loss reflection_pad_nd replication_pad_nd stft tp_poisson_nll_loss".split()
    )


@pytest.mark.parametrize("op", ["addmv", "matrix_exp", "_scaled_dot_product_attention_math"])
def test_the_ops_that_run_in_float32_for_want_of_a_kernel_are_in_the_repairs(op: str) -> None:
    assert lacks(op, "bfloat16")
    assert lacks(op, "float16")
