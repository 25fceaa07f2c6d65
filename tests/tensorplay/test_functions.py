"""`custom_fwd` and `custom_bwd`."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import tensorplay as tp

import mezzo.tensorplay as mt
from mezzo.errors import RegionError

X = tp.ones(2, 2)


def name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("tensorplay.")


def function(cast_inputs: Any = None, fwd: Any = mt.custom_fwd, bwd: Any = mt.custom_bwd) -> Any:
    """Make a product of matrices that writes down the dtypes it sees, forward and backward."""
    seen: list[tuple[str, bool]] = []

    class Product(tp.autograd.Function):
        log = seen

        @staticmethod
        @fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx: Any, a: Any, b: Any) -> Any:
            ctx.save_for_backward(a, b)
            seen.append((name(a), mt.is_autocast_enabled("cpu")))
            return a @ b

        @staticmethod
        @bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Any) -> Any:
            a, b = ctx.saved_tensors
            product = gradient @ b.t()
            seen.append((name(product), mt.is_autocast_enabled("cpu")))
            return product.to(a.dtype), (a.t() @ gradient).to(b.dtype)

    return Product


@pytest.mark.parametrize("where", ["inside", "outside", "in another region"])
def test_backward_runs_in_the_state_of_forward(where: str) -> None:
    product, weight = function(), tp.ones(2, 2, requires_grad=True)
    with mt.autocast("cpu"):
        out = product.apply(X, weight)
        if where == "inside":
            out.sum().backward()
    if where == "outside":
        out.sum().backward()
    elif where == "in another region":
        with mt.autocast("cpu", tp.float16):
            out.sum().backward()
    assert name(out) == "bfloat16"
    assert product.log == [("float32", True), ("bfloat16", True)]
    assert name(weight.grad) == "float32"


def test_backward_runs_under_the_policy_of_forward() -> None:
    product, weight = function(), tp.ones(2, 2, requires_grad=True)
    with mt.autocast("cpu", policy="fp32"):
        out = product.apply(X, weight)
    with mt.autocast("cpu"):
        out.sum().backward()
    assert product.log == [("float32", True), ("float32", True)]


def test_outside_of_regions_nothing_is_cast() -> None:
    product, weight = function(tp.bfloat16), tp.ones(2, 2, requires_grad=True)
    product.apply(X, weight).sum().backward()
    assert product.log == [("float32", False), ("float32", False)]


@pytest.mark.parametrize("target", [tp.float32, tp.float16])
def test_cast_inputs_casts_and_runs_with_autocast_off(target: Any) -> None:
    product, weight = function(target), tp.ones(2, 2, requires_grad=True)
    with mt.autocast("cpu"):
        out = product.apply(X.bfloat16(), weight)
    out.sum().backward()
    low = name(X.to(target))
    assert name(out) == low
    assert product.log == [(low, False), (low, False)]
    assert name(weight.grad) == "float32"


def test_cast_inputs_leaves_float64_and_integers_and_looks_into_containers() -> None:
    Pair = namedtuple("Pair", "a b")
    seen = []

    class Nested(tp.autograd.Function):
        @staticmethod
        @mt.custom_fwd(device_type="cpu", cast_inputs=tp.bfloat16)
        def forward(ctx: Any, x: Any, pair: Any, options: Any) -> Any:
            ctx.mark = None
            seen.append([name(x), type(pair).__name__, name(pair.a), name(pair.b), name(options["weight"])])
            return x * 1

        @staticmethod
        @mt.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient, ctx.mark, None

    with mt.autocast("cpu"):
        Nested.apply(X.double().requires_grad_(), Pair(X, X.long()), {"weight": X})
    assert seen == [["float64", "Pair", "bfloat16", "int64", "bfloat16"]]


def test_the_packages_own_decorators_see_a_region_of_mezzos() -> None:
    product = function(fwd=tp.amp.custom_fwd, bwd=tp.amp.custom_bwd)
    weight = tp.ones(2, 2, requires_grad=True)
    with mt.autocast("cpu"):
        product.apply(X, weight).sum().backward()
    assert product.log == [("float32", True), ("bfloat16", True)]


def test_decorators_of_both_can_stand_over_one_function() -> None:
    product, weight = function(fwd=tp.amp.custom_fwd), tp.ones(2, 2, requires_grad=True)
    with mt.autocast("cpu"):
        out = product.apply(X, weight)
    out.sum().backward()
    assert product.log == [("float32", True), ("bfloat16", True)]


def test_backward_without_a_decorated_forward_says_so() -> None:
    class Half(tp.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.factor = 1
            return x * 1

        @staticmethod
        @mt.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * ctx.factor

    with pytest.raises(RegionError, match=r"its context has no autocast state\. Decorate forward with custom_fwd"):
        Half.apply(tp.ones(1, requires_grad=True)).sum().backward()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
        mt.custom_fwd(device_type=None)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"cast_inputs must be a dtype of TensorPlay such as tensorplay\.float32, got 'half'"
    ):
        mt.custom_fwd(device_type="cpu", cast_inputs="half")


def test_decorators_take_the_function_itself_too() -> None:
    def forward(ctx: Any, x: Any) -> Any:
        """Give back."""
        return x

    decorated = mt.custom_fwd(forward, device_type="cpu")
    assert decorated.__doc__ == "Give back."
    assert mt.custom_bwd(forward, device_type="cpu").__name__ == "forward"
