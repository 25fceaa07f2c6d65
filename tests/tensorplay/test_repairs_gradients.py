"""Gradients of repaired calls: there, of the dtype of each input, and those of a float32 call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorplay

import mezzo.tensorplay as mt
from mezzo import tables
from tests.tensorplay.op_calls import CALLS, float_tensors, function_of, make, tensor_of
from tests.tensorplay.op_runs import HALVES, ROUNDING, distance, dtype_names, tensor_count
from tests.tensorplay.op_samples import normal
from tests.tensorplay.test_repairs import NO_SAMPLE, NOTHING_LISTED, RANDOM_OR_ROUGH, REPAIRS

F32 = tensorplay.float32
ROUGH = {
    **RANDOM_OR_ROUGH,
    "linalg_matrix_rank": "a count",
    "norm_except_dim": "its gradient is not followed",
}


def gradients(op: str, dtypes: list[Any], half: Any, *, region: bool) -> list[Any] | None:
    """Give the gradients of a weighted sum of a call's results; None if a float32 call has none."""
    args, kwargs, leaves = make(CALLS[op], dtypes, grad=True)
    with mt.autocast("cpu", dtype=half, policy=NOTHING_LISTED, enabled=region):
        outs = [out for out in float_tensors(function_of(op)(*args, **kwargs)) if out.requires_grad]
    if not outs:
        return None
    total = tensorplay.zeros([])
    for out in outs:
        weights = tensor_of(np.cos(np.arange(out.numel(), dtype=np.float32) * 1.7 + 0.5).reshape(tuple(out.shape)))
        total = total + (out.to(F32) * weights).sum()
    total.backward()
    return [leaf.grad for leaf in leaves]


def right_gradients(op: str) -> list[Any] | None:
    try:
        return gradients(op, [F32], tensorplay.bfloat16, region=False)
    except (RuntimeError, NotImplementedError, TypeError, IndexError):
        return None


def assert_gradients(op: str, dtypes: list[Any], half: Any) -> None:
    right = right_gradients(op)
    assert right is not None
    found = gradients(op, dtypes, half, region=True)
    assert found is not None
    chosen = [dtypes[min(place, len(dtypes) - 1)] for place in range(len(found))]
    for mine, wanted, dtype in zip(found, right, chosen, strict=True):
        if wanted is None:
            # A cast gives zeros to what has no part in the result.
            assert mine is None or not mine.to(F32).abs().sum().item()
        else:
            assert mine is not None
        if wanted is not None and op not in ROUGH:
            assert dtype_names([mine]) == [str(dtype).split(".")[-1]]
            # Rounded inputs, and each gradient rounded to its input's dtype, times the condition of the op.
            assert distance(mine, wanted) <= 32 * ROUNDING[str(half).split(".")[-1]]


def with_gradients(ops: list[str]) -> list[str]:
    """Leave out the ops that have no gradient in float32, or raise in its backward."""
    return sorted(op for op in ops if op not in NO_SAMPLE and right_gradients(op) is not None)


MIXED = with_gradients(
    [op for op, cure in REPAIRS.items() if cure.startswith("promote") and op in CALLS and tensor_count(op) > 1]
)
LACKING = with_gradients([op for op in tables.lacking("tensorplay") if not op.endswith("_")])


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("op", MIXED)
def test_a_mixed_call_has_the_gradients_of_a_float32_call(op: str, half: Any) -> None:
    assert_gradients(op, [half, F32], half)
    assert_gradients(op, [F32, half], half)


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("op", LACKING)
def test_a_low_call_without_a_kernel_has_gradients(op: str, half: Any) -> None:
    assert_gradients(op, [half], half)


def test_most_repaired_ops_have_gradients() -> None:
    assert len(MIXED) > 40
    assert len(LACKING) > 50


@pytest.mark.parametrize("policy", ["default", "unified"])
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_masked_attention_has_gradients_that_low_inputs_lose_outside(half: Any, policy: str) -> None:
    query = tensor_of(normal(1, 2, 3, 4)).to(half).requires_grad_()
    mask = tensorplay.zeros(3, 3, dtype=half)
    attend = tensorplay.nn.functional.scaled_dot_product_attention
    assert not attend(query, query, query, attn_mask=mask).requires_grad
    with mt.autocast("cpu", dtype=half, policy=policy):
        out = attend(query, query, query, attn_mask=mask)
    assert out.requires_grad
    out.sum().backward()
    wide = query.detach().to(F32).requires_grad_()
    attend(wide, wide, wide).sum().backward()
    # The gradient is rounded to the input's dtype, and three of them are added up in it.
    assert distance(query.grad, wide.grad) <= 8 * ROUNDING[str(half).split(".")[-1]]
