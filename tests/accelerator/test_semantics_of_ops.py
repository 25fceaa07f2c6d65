"""What ops do in a region on a plugged-in accelerator, for `torch.autocast` and `mezzo.torch.autocast` alike.

Each cast policy is met here as users meet it, by PyTorch's functions and methods; `test_reference_list.py` has every op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from standin_backend import calls
from torch import nn

from .both import DEVICE, Autocast, both_classes, low_dtypes, on_device, product_dtype

pytestmark = both_classes

BANNED = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)


# The five cast policies and the ban


@low_dtypes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_lower_precision_op(autocast: Autocast, low: torch.dtype, dtype: torch.dtype) -> None:
    with autocast(DEVICE, dtype=low), calls() as ran:
        result = on_device(2, 3, dtype=dtype) @ on_device(3, 4)
    assert result.dtype is low
    assert [call.inputs for call in ran if call.op == "mm"] == [(low, low)]


@low_dtypes
def test_a_float32_op(autocast: Autocast, low: torch.dtype) -> None:
    with autocast(DEVICE, dtype=low), calls() as ran:
        results = [on_device(3, dtype=low).asin(), on_device(3, dtype=low) ** 2, on_device(3).exp()]
    assert {result.dtype for result in results} == {torch.float32}
    assert {call.inputs for call in ran if call.op in {"asin", "pow", "exp"}} == {(torch.float32,)}


@low_dtypes
def test_an_op_that_is_told_to_give_float32(autocast: Autocast, low: torch.dtype) -> None:
    values = on_device(2, 3, dtype=low)
    with autocast(DEVICE, dtype=low), calls() as ran:
        found = [values.sum(), values.sum(0), values.prod(), values.cumsum(0), values.softmax(-1)]
    assert {result.dtype for result in found} == {torch.float32}
    assert [call.inputs for call in ran if call.op == "sum"] == [(low,)] * 2, "its input is not cast"


@low_dtypes
def test_a_dtype_that_the_caller_gives_is_respected(autocast: Autocast, low: torch.dtype) -> None:
    values = on_device(2, 3)
    with autocast(DEVICE, dtype=low):
        assert values.sum(dtype=low).dtype is low
        assert values.sum(0, dtype=torch.float64).dtype is torch.float64
        assert values.cumsum(0, dtype=torch.int64).dtype is torch.int64
        assert values.softmax(-1, dtype=low).dtype is low
        assert F.log_softmax(values, -1, dtype=torch.float64).dtype is torch.float64


@low_dtypes
def test_a_norm_gets_a_dtype(autocast: Autocast, low: torch.dtype) -> None:
    with autocast(DEVICE, dtype=low):
        assert torch.ops.aten.norm.Scalar(on_device(4, dtype=low)).dtype is torch.float32
        assert on_device(4, dtype=low).norm().dtype is torch.float32
        assert torch.ops.aten.norm.Scalar(on_device(4, dtype=torch.float64)).dtype is torch.float64


@low_dtypes
def test_an_op_that_promotes(autocast: Autocast, low: torch.dtype) -> None:
    few, many = on_device(4, dtype=low), on_device(4)
    with autocast(DEVICE, dtype=low):
        assert torch.dot(few, few).dtype is low
        assert torch.dot(few, many).dtype is torch.float32
        assert torch.dot(many, few).dtype is torch.float32
        assert torch.addcmul(few, few, many).dtype is torch.float32
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.dot(few, many)


@low_dtypes
def test_an_op_on_no_list_runs_in_the_dtype_of_its_inputs(autocast: Autocast, low: torch.dtype) -> None:
    with autocast(DEVICE, dtype=low), calls() as ran:
        assert (on_device(3) + on_device(3)).dtype is torch.float32
        assert F.gelu(on_device(3, dtype=low)).dtype is low
        assert torch.add(on_device(3), on_device(3, dtype=low)).dtype is torch.float32
        assert on_device(2, 2).t().dtype is torch.float32
    assert "_to_copy" not in {call.op for call in ran}


@low_dtypes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_binary_cross_entropy_is_banned(autocast: Autocast, low: torch.dtype, dtype: torch.dtype) -> None:
    shares, wanted = on_device(3, dtype=dtype), on_device(3, dtype=dtype)
    with autocast(DEVICE, dtype=low):
        for function in (F.binary_cross_entropy, nn.BCELoss()):
            with pytest.raises(RuntimeError) as raised:
                function(shares, wanted)
            assert str(raised.value) == BANNED
        assert F.binary_cross_entropy_with_logits(shares, wanted).dtype in {torch.float32, torch.float64}
        with autocast(DEVICE, enabled=False):
            assert F.binary_cross_entropy(shares, wanted).dtype is dtype


# What is cast and what is not


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32], ids=str)
def test_float64_and_integers_are_not_cast(autocast: Autocast, dtype: torch.dtype) -> None:
    values = torch.ones(2, 2, dtype=dtype, device=DEVICE)
    with autocast(DEVICE), calls() as ran:
        assert torch.mm(values, values).dtype is dtype
        assert values.sum().dtype is (dtype if dtype.is_floating_point else torch.int64)
    assert "_to_copy" not in {call.op for call in ran}


def test_float64_beside_float32_is_left_to_the_op_by_torch_and_promoted_by_mezzo(autocast: Autocast) -> None:
    wide, other = on_device(2, 2, dtype=torch.float64), on_device(2, 2)
    with autocast(DEVICE):
        if autocast is torch.autocast:
            with pytest.raises(RuntimeError, match="same dtype"):
                torch.mm(wide, other)
        else:
            assert torch.equal(torch.mm(wide, other), wide @ wide)
        assert torch.atan2(wide, other).dtype is torch.float64
        assert F.mse_loss(wide, other).dtype is torch.float64


def test_tensors_on_the_cpu_are_not_cast(autocast: Autocast) -> None:
    with autocast(DEVICE):
        assert product_dtype("cpu") is torch.float32
        assert torch.ones(3, dtype=torch.bfloat16).exp().dtype is torch.bfloat16
        assert F.binary_cross_entropy(torch.ones(3), torch.ones(3)).dtype is torch.float32


def test_a_region_of_the_cpu_leaves_the_device_alone(autocast: Autocast) -> None:
    with autocast("cpu"):
        assert product_dtype("cpu") is torch.bfloat16
        assert product_dtype() is torch.float32
        assert F.binary_cross_entropy(on_device(3), on_device(3)).dtype is torch.float32


@pytest.mark.parametrize("outer", ["cpu", DEVICE])
def test_regions_of_two_devices_cast_each_their_own(autocast: Autocast, outer: str) -> None:
    low = {"cpu": torch.bfloat16, DEVICE: torch.float16}
    inner = DEVICE if outer == "cpu" else "cpu"
    with autocast(outer):
        with autocast(inner):
            assert (product_dtype("cpu"), product_dtype()) == (low["cpu"], low[DEVICE])
            with autocast(outer, enabled=False):
                assert (product_dtype(outer), product_dtype(inner)) == (torch.float32, low[inner])
        assert (product_dtype(outer), product_dtype(inner)) == (low[outer], torch.float32)


# Autograd and weights


@low_dtypes
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_gradients_go_through_the_casts(autocast: Autocast, low: torch.dtype, inside: bool) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(4, 3), torch.randn(3, 2)
    there = [one.to(DEVICE).requires_grad_() for one in numbers]
    with autocast(DEVICE, dtype=low):
        result = there[0] @ there[1]
        if inside:
            result.backward(torch.ones_like(result))
    if not inside:
        result.backward(torch.ones_like(result))
    here = [one.requires_grad_() for one in numbers]
    product = here[0].to(low) @ here[1].to(low)
    product.backward(torch.ones_like(product))
    assert result.grad_fn is not None
    for mine, other in zip(there, here, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert mine.grad.dtype is torch.float32
        assert torch.equal(mine.grad.cpu(), other.grad)


@pytest.mark.parametrize(("cache_enabled", "casts"), [(True, 1), (False, 3)])
def test_a_weight_is_cast_once_in_a_region_unless_the_cache_is_off(
    autocast: Autocast, cache_enabled: bool, casts: int
) -> None:
    weight = on_device(3, 3).requires_grad_()
    values = on_device(2, 3, dtype=torch.float16)
    with autocast(DEVICE, cache_enabled=cache_enabled), calls() as ran:
        results = [values @ weight for _ in range(3)]
    assert {result.dtype for result in results} == {torch.float16}
    assert [call.op for call in ran].count("_to_copy") == casts


def test_the_cache_flag_is_set_inside_and_restored(autocast: Autocast) -> None:
    with autocast(DEVICE, cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()
        with autocast(DEVICE):
            assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_casts_are_made_all_the_same(autocast: Autocast, mode: Callable[[], Any]) -> None:
    linear = nn.Linear(3, 2).to(DEVICE)
    with mode(), autocast(DEVICE), calls() as ran:
        result = linear(on_device(4, 3))
        assert result.softmax(-1).dtype is torch.float32
    assert result.dtype is torch.float16
    assert not result.requires_grad
    assert result.is_inference() is (mode is torch.inference_mode)
    assert {call.inputs for call in ran if call.op == "addmm"} == {(torch.float16,) * 3}


def test_a_forward_without_gradients_does_not_spoil_the_next_with_them(autocast: Autocast) -> None:
    linear = nn.Linear(3, 2).to(DEVICE)
    with autocast(DEVICE):
        with torch.no_grad():
            linear(on_device(4, 3))
        loss = linear(on_device(4, 3)).float().sum()
    loss.backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype is torch.float32
