"""A cast of a weight that mezzo's kernels keep is never stale, nor used where another one is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import mezzo.torch
from mezzo.torch.cache import casts_of_thread

from .weights import LOW, OTHER, VECTOR, fresh, multiply, new_weight, one_cast, unified

if TYPE_CHECKING:
    from collections.abc import Callable

low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)


@pytest.fixture
def weight() -> nn.Parameter:
    return new_weight()


def step(optimizer: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Parameter], None]:
    def change(weight: nn.Parameter) -> None:
        weight.grad = torch.ones_like(weight)
        optimizer([weight], lr=0.5, **options).step()

    return change


def in_no_grad(call: Callable[[nn.Parameter], object]) -> Callable[[nn.Parameter], None]:
    def change(weight: nn.Parameter) -> None:
        with torch.no_grad():
            call(weight)

    return change


def swap_data(weight: nn.Parameter) -> None:
    weight.data = weight.data + 1


CHANGES: dict[str, Callable[[nn.Parameter], None]] = {
    "mul_": in_no_grad(lambda weight: weight.mul_(2)),
    "copy_": in_no_grad(lambda weight: weight.copy_(torch.ones(4, 4))),
    "one element": in_no_grad(lambda weight: weight[0].fill_(3)),
    "data": swap_data,
    "load_state_dict": lambda weight: nn.ParameterList([weight]).load_state_dict({"0": torch.ones(4, 4)}),
    "SGD foreach": step(torch.optim.SGD, foreach=True),
    "SGD loop": step(torch.optim.SGD, foreach=False),
    "SGD fused": step(torch.optim.SGD, fused=True),
    "AdamW fused": step(torch.optim.AdamW, fused=True),
    "Adagrad fused": step(torch.optim.Adagrad, fused=True),
}


@low_dtypes
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_weight_that_has_changed_is_cast_afresh(weight, low, change):
    with unified(low):
        before = multiply(weight)
        change(weight)
        after, again = multiply(weight), multiply(weight)
    assert not torch.equal(before, after)
    assert torch.equal(after, fresh(weight, low))
    assert one_cast(after, again)


@low_dtypes
def test_the_observer_sees_that_a_changed_weight_is_cast_afresh(weight, low):
    with mezzo.torch.observe("cpu") as seen, unified(low):
        multiply(weight)
        CHANGES["mul_"](weight)
        multiply(weight)
        CHANGES["AdamW fused"](weight)
        multiply(weight)
        multiply(weight)
    assert [call.casts for call in seen.calls if call.op == "aten::mv"] == [2, 2, 2, 1]


@low_dtypes
def test_a_nested_region_of_another_dtype_gets_a_cast_of_its_own(weight, low):
    with unified(low):
        outer = multiply(weight)
        with unified(OTHER[low]):
            inner = multiply(weight)
        again = multiply(weight)
    assert (outer.dtype, inner.dtype) == (low, OTHER[low])
    assert torch.equal(inner, fresh(weight, OTHER[low]))
    assert one_cast(outer, again)


@low_dtypes
def test_a_cast_made_without_gradients_has_them_when_they_are_wanted(weight, low):
    with unified(low):
        with torch.no_grad():
            assert not multiply(weight).requires_grad
        multiply(weight).sum().backward()
    assert torch.equal(weight.grad, VECTOR.expand(4, 4))


@low_dtypes
def test_a_cast_made_in_inference_mode_is_no_inference_tensor(weight, low):
    with unified(low):
        with torch.inference_mode():
            product = multiply(weight)
            assert product.is_inference()
            assert product.dtype == low
            assert not casts_of_thread()[0].is_inference()
        multiply(weight).sum().backward()
        assert len(casts_of_thread()) == 1
        with torch.inference_mode():
            assert torch.equal(multiply(weight), fresh(weight, low))
    assert torch.equal(weight.grad, VECTOR.expand(4, 4))


@low_dtypes
def test_a_new_weight_at_the_place_of_a_dead_one_gets_its_own_cast(low):
    with unified(low):
        for value in range(20):
            weight = nn.Parameter(torch.full((4, 4), float(value)))
            assert torch.equal(multiply(weight), fresh(weight, low))
            del weight


@low_dtypes
def test_a_transformed_weight_is_neither_kept_nor_mistaken_for_the_real_one(weight, low):
    def loss(tensor: Tensor) -> Tensor:
        return multiply(tensor).sum()

    with unified(low):
        first = multiply(weight)
        gradient = torch.func.grad(loss)(weight)
        assert torch.equal(gradient, VECTOR.expand(4, 4))
        assert len(casts_of_thread()) == 1
        assert one_cast(first, multiply(weight))


@low_dtypes
def test_a_weight_made_in_inference_mode_is_cast_each_time_and_not_kept(low):
    with torch.inference_mode():
        weight = new_weight()
    with torch.no_grad(), unified(low):
        assert torch.equal(multiply(weight), fresh(weight, low))
        assert casts_of_thread() == []


@low_dtypes
def test_a_sparse_weight_has_no_address_and_is_cast_each_time(low):
    weight = new_weight().detach().to_sparse().requires_grad_()
    with unified(low):
        product = multiply(weight)
    assert product.dtype == low
    assert torch.equal(product, fresh(weight, low))
