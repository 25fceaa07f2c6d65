"""Calls that native autocast gets wrong, or that raise under it, are right in mezzo's regions."""

from __future__ import annotations

from typing import Any

import pytest
import tensorplay as tp
import tensorplay.nn.functional as F

import mezzo.tensorplay

from .defect_calls import LOW_RAISES, LOW_WRONG, MIXED_RAISES, MIXED_RIGHT, MIXED_WRONG, RECURRENT, Call, error_of
from .defects import LOW, LOW_NAMES, Amp

MEZZO = Amp(mezzo.tensorplay)
MIXED = MIXED_RAISES | MIXED_WRONG | MIXED_RIGHT
low_dtypes = pytest.mark.parametrize("low", LOW, ids=LOW_NAMES)
policies = pytest.mark.parametrize("policy", ["default", "unified"])

# Inputs come exactly; products, sums and the result are rounded to 8 or 11 bits.
NEAR = {tp.bfloat16: 2**-6, tp.float16: 2**-9}


@low_dtypes
@policies
@pytest.mark.parametrize("other", [tp.float32, tp.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("call", MIXED.values(), ids=MIXED)
def test_mixed_dtypes_give_right_numbers(call: Call, low: Any, policy: str, other: Any) -> None:
    with MEZZO.region(low, policy=policy):
        assert error_of(call, call.mixed(low, other)) <= NEAR[low]


@low_dtypes
@policies
@pytest.mark.parametrize("call", (LOW_RAISES | LOW_WRONG).values(), ids=LOW_RAISES | LOW_WRONG)
def test_an_op_without_a_low_kernel_gives_right_numbers(call: Call, low: Any, policy: str) -> None:
    with MEZZO.region(low, policy=policy):
        assert error_of(call, call.low(low)) <= NEAR[low]


@low_dtypes
@pytest.mark.parametrize("call", LOW_RAISES.values(), ids=LOW_RAISES)
def test_an_op_without_a_low_kernel_gives_right_gradients(call: Call, low: Any) -> None:
    exact = call.run_and_back(call.inputs())
    with MEZZO.region(low):
        found = call.run_and_back(call.low(low))
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == low
        assert (one.float() - other).abs().max().item() <= NEAR[low] * other.abs().max().item()


@low_dtypes
@pytest.mark.parametrize("cell", RECURRENT.values(), ids=RECURRENT)
def test_a_recurrent_layer_takes_a_low_input(cell: Any, low: Any) -> None:
    layer, sequence = cell(4, 4), tp.randn(3, 2, 4).to(low)
    exact, _ = layer(sequence.float())
    with MEZZO.region(low):
        found, _ = layer(sequence)
    # Three steps, each with a state that is rounded once or more.
    assert (found.float() - exact).abs().max().item() <= 8 * NEAR[low]


@low_dtypes
def test_a_product_with_float64_is_float64(low: Any) -> None:
    double, single = tp.randn(3, 3).double(), tp.randn(3, 3)
    with MEZZO.region(low):
        products = [tp.mm(double, single), double @ single, tp.matmul(single, double), F.linear(double, single)]
    exact = [double @ single.double(), double @ single.double(), single.double() @ double, double @ single.double().t()]
    for found, other in zip(products, exact, strict=True):
        assert found.dtype == tp.float64
        assert (found - other).abs().max().item() < 1e-12


def test_what_is_written_into_a_tensor_takes_its_dtype() -> None:
    target, rows = tp.zeros(4, 2), tp.tensor([3, 1])
    with MEZZO.region():
        product = tp.ones(2, 2) @ tp.ones(2, 2)
        target.index_put_((rows,), product)
    assert product.dtype == tp.bfloat16
    assert target.dtype == tp.float32
    assert target.tolist() == [[0, 0], [2, 2], [0, 0], [2, 2]]
