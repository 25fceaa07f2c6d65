"""`register_function` on methods, autograd functions and `flex_attention`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention import flex_attention as flex

from mezzo.torch import autocast, register_function

LOW = torch.bfloat16


def qkv(*dtypes: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(4, 4).to(dtype) for dtype in dtypes]


# On classes and objects


class Kernels:
    def method(self, x: Tensor) -> tuple[object, torch.dtype]:
        return self, x.dtype

    @staticmethod
    def static(x: Tensor) -> torch.dtype:
        return x.dtype

    @classmethod
    def of_class(cls, x: Tensor) -> tuple[object, torch.dtype]:
        return cls, x.dtype

    builtin = torch.relu


class Inheriting(Kernels):
    pass


def test_every_kind_of_method_can_be_registered_and_is_put_back() -> None:
    before, x = dict(vars(Inheriting)), torch.ones(1)
    names = ["method", "static", "of_class", "builtin"]
    registered = [register_function(Inheriting, name, "lower_precision_fp") for name in names]
    one = Inheriting()
    with autocast("cpu", dtype=LOW):
        assert one.method(x) == (one, LOW)
        assert one.static(x) is Inheriting.static(x) is LOW
        assert Inheriting.of_class(x) == (Inheriting, LOW)
        assert one.builtin(x).dtype is LOW
        assert Kernels().method(x)[1] is torch.float32
    for registration in registered:
        registration.remove()
    assert dict(vars(Inheriting)) == before


def test_an_object_gets_the_wrapper_for_itself() -> None:
    one, other, x = Kernels(), Kernels(), torch.ones(1)
    with register_function(one, "method", "lower_precision_fp"), autocast("cpu", dtype=LOW):
        assert one.method(x) == (one, LOW)
        assert other.method(x) == (other, torch.float32)
    assert vars(one) == {}


class Product(Function):
    """Fails under autocast: its backward meets two dtypes."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad @ b.mT, a.mT @ grad


def product_gradients(*dtypes: torch.dtype) -> list[Tensor]:
    tensors = [tensor.requires_grad_() for tensor in qkv(*dtypes)]
    with autocast("cpu", dtype=LOW):
        out = Product.apply(*tensors)
    out.sum().backward()
    return [tensor.grad for tensor in tensors]


def test_a_foreign_autograd_function_is_cured_by_registering_its_apply() -> None:
    with pytest.raises(RuntimeError, match="same dtype"):
        product_gradients(torch.float32, LOW)
    with register_function(Product, "apply", "fp32"):
        a, b = product_gradients(torch.float32, LOW)
    assert (a.dtype, b.dtype) == (torch.float32, LOW)
    left, right = (tensor.float() for tensor in qkv(torch.float32, LOW))
    assert torch.equal(a, torch.ones(4, 4) @ right.mT)
    assert torch.equal(b, (left.mT @ torch.ones(4, 4)).to(LOW))
    assert "apply" not in vars(Product)


# flex_attention: PyTorch has a rule of its own for it, of which no policy knows


@pytest.fixture
def _flex() -> Iterator[None]:
    with register_function(flex, "flex_attention", "lower_precision_fp"):
        yield


def heads(*dtypes: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, 16, 8).to(dtype) for dtype in dtypes]


unfused = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
MIXED_HEADS = (LOW, torch.float32, LOW)


@unfused
@pytest.mark.usefixtures("_flex")
def test_flex_attention_takes_mixed_tensors() -> None:
    with autocast("cpu", dtype=LOW):
        got = flex.flex_attention(*heads(*MIXED_HEADS))
    expected = flex.flex_attention(*(tensor.to(LOW) for tensor in heads(*MIXED_HEADS)))
    assert got.dtype is LOW
    assert torch.equal(got, expected)


@unfused
@pytest.mark.parametrize(("rule", "policy"), [("lower_precision_fp", "fp32"), ("fp32", "torch")])
def test_flex_attention_runs_in_float32_where_that_is_asked_for(rule: str, policy: str) -> None:
    tensors = heads(LOW, LOW, LOW)
    with register_function(flex, "flex_attention", rule), autocast("cpu", dtype=LOW, policy=policy):
        got = flex.flex_attention(*tensors)
    assert got.dtype is torch.float32
    assert torch.equal(got, flex.flex_attention(*(tensor.float() for tensor in tensors)))


@unfused
@pytest.mark.usefixtures("_flex")
def test_flex_attention_is_cast_in_compiled_code() -> None:
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, backend="aot_eager", fullgraph=True)
    tensors = heads(*MIXED_HEADS)
    for region in (autocast, torch.autocast):
        with region("cpu", dtype=LOW), torch.no_grad():
            assert torch.equal(compiled(*tensors), flex.flex_attention(*tensors))
    with autocast("cpu", dtype=LOW, policy="fp32"), torch.no_grad():
        assert compiled(*tensors).dtype is torch.float32
    torch.compiler.reset()
