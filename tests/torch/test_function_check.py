"""Custom autograd functions without decorators: what PyTorch's engine sees to, and what `check_function` finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from mezzo.torch import autocast, check_function, custom_bwd, custom_fwd
from mezzo.torch.function_check import FunctionError
from mezzo.torch.function_trials import Trial

LOW = torch.bfloat16


class Product(Function):
    """Computes in the region's dtype what its backward then meets in another."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad @ b.mT, a.mT @ grad


class NewStyle(Function):
    """The same with ``setup_context``."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], _output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = Product.backward


class Decorated(Product):
    forward = staticmethod(custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(custom_bwd(Product.backward, device_type="cpu"))


class Numpy(Function):
    """Has a kernel that cannot take bfloat16."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy() * 2)


class Bits(Function):
    """Takes 16 bits of a tensor for 16 bits of a float32: silently wrong numbers."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        # Scale by two: one more in the exponent.
        wide = x.view(torch.int32 if x.element_size() == 4 else torch.int16)
        return (wide + (1 << 23 if x.element_size() == 4 else 1 << 10)).view(x.dtype)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Writing(Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.mark_dirty(x)
        return x.mul_(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Noise(Function):
    """Draws random numbers, and takes a nest of tensors it does not differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        mask = torch.bernoulli(torch.full(x.shape, 0.5)).to(x.dtype) * options["scale"]
        ctx.save_for_backward(mask)
        ctx.mark_non_differentiable(mask)
        return x * mask, mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class Underflow(Function):
    """Right in bfloat16, and out of the range of float16."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 1e-6 * 1e-3

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1e-6 * 1e-3


class Forgetful(Function):
    """Has a gradient in float32 only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.low = x.dtype is LOW
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        return None if ctx.low else grad * 2


# What the engine sees to


@pytest.mark.parametrize(
    "returned", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32], ids=str
)
@pytest.mark.parametrize("came", [torch.bfloat16, torch.float32], ids=str)
def test_the_engine_gives_each_gradient_the_dtype_of_its_input(came: torch.dtype, returned: torch.dtype) -> None:
    """Whatever backward returns, and for the node below too; so there is nothing for mezzo to mend."""

    class Returning(Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(_ctx: Any, grad: Tensor) -> Tensor:
            return (grad * 2).to(returned)

    leaf, below = torch.ones(2, dtype=came, requires_grad=True), []
    inner = leaf * 1
    inner.register_hook(lambda gradient: below.append(gradient.dtype))
    with autocast("cpu", dtype=LOW):
        out = Returning.apply(inner)
    out.sum().backward()
    assert leaf.grad.dtype is came
    assert below == [came]
    assert torch.equal(leaf.grad, torch.full((2,), 2, dtype=came))


# What the check finds


MIXED_PRODUCT = """\
{name} goes wrong in autocast regions, in 3 of 8 trials:
  inputs float32, float32; backward after the region: RuntimeError: expected m1 and m2 to have the same dtype, but got: \
c10::BFloat16 != float
  inputs float32, bfloat16; backward after the region: RuntimeError: expected m1 and m2 to have the same dtype, but got: \
float != c10::BFloat16
  inputs bfloat16, float32; backward after the region: RuntimeError: expected m1 and m2 to have the same dtype, but got: \
c10::BFloat16 != float
Tried, and all right (custom_fwd and custom_bwd of mezzo.torch):
  @custom_fwd(device_type='cpu') on forward, @custom_bwd(device_type='cpu') on backward{setup}
  if it is not yours: mezzo.torch.register_function({name}, "apply", "fp32")"""


def message_of(function: type[Function], *args: Any, **options: Any) -> str:
    with pytest.raises(FunctionError) as caught:
        check_function(function, *args, device_type="cpu", **options)
    return str(caught.value)


def square(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("function", "setup"), [(Product, ""), (NewStyle, "; setup_context as forward")])
def test_a_function_whose_backward_meets_two_dtypes_is_named_with_the_cure(
    function: type[Function], setup: str
) -> None:
    message = message_of(function, square(4, 4), square(4, 4))
    assert message == MIXED_PRODUCT.format(name=function.__name__, setup=setup)


def test_the_decorated_function_passes() -> None:
    trials = check_function(Decorated, square(4, 4), square(4, 4), device_type="cpu")
    assert len(trials) == 8
    assert trials[0] == Trial(("float32", "float32"), "after the region", "")
    assert str(trials[7]) == "inputs bfloat16, bfloat16; backward in the region: right"


def test_a_kernel_that_lacks_the_dtype_is_to_get_float32() -> None:
    message = message_of(Numpy, square(4))
    assert "in 2 of 4 trials:\n  inputs bfloat16; backward after the region: TypeError: Got unsupported" in message
    assert "@custom_fwd(device_type='cpu', cast_inputs=torch.float32) on forward" in message
    check_function(Numpy, square(4), device_type="cpu", dtype=torch.float16)


def test_silently_wrong_numbers_are_found() -> None:
    message = message_of(Bits, square(4) + 1)
    # 2 ** 8 in the place of 2: 127 times what is right.
    assert "inputs bfloat16; backward after the region: output 0 is off by 1.3e+02 of its norm" in message
    assert "cast_inputs=torch.float32" in message


def test_a_missing_gradient_is_found() -> None:
    message = message_of(Forgetful, square(4))
    assert "the gradient of tensor 0 is missing, and not without autocast" in message


def test_numbers_out_of_the_range_are_found_in_the_dtype_that_has_it() -> None:
    check_function(Underflow, square(4), device_type="cpu")
    message = message_of(Underflow, square(4), dtype=torch.float16)
    assert "inputs float16; backward after the region: output 0 is off by 1 of its norm" in message


def test_functions_that_write_or_draw_or_take_nests_pass() -> None:
    before = torch.random.get_rng_state()
    x = square(4, 4)
    kept = x.clone()
    assert len(check_function(Writing, x, 3.0, device_type="cpu")) == 4
    assert torch.equal(x, kept)
    noise = check_function(Noise, x.requires_grad_(), {"scale": torch.full((), 2.0)}, device_type="cpu")
    assert len(noise) == 8
    assert x.grad is None
    assert torch.equal(torch.random.get_rng_state(), before)


def test_many_tensors_are_tried_alone_and_together() -> None:
    class Sum(Function):
        @staticmethod
        def forward(_ctx: Any, *tensors: Tensor) -> Tensor:
            return sum(tensors[1:], tensors[0])

        @staticmethod
        def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            return (grad,) * 5

    trials = check_function(Sum, *(square(4) for _ in range(5)), device_type="cpu")
    assert len({trial.inputs for trial in trials}) == 12


def test_the_policy_of_the_regions_can_be_given() -> None:
    assert "3 of 8" in message_of(Product, square(4, 4), square(4, 4), policy="torch")
    # With products in float32, only low inputs are met by a gradient of another dtype.
    everything_else = message_of(Product, square(4, 4), square(4, 4), policy="fp32")
    assert "inputs float32, float32" not in everything_else
    assert "inputs bfloat16, bfloat16; backward after the region: RuntimeError" in everything_else


def test_a_function_that_nothing_helps_is_said_so() -> None:
    calls = iter(range(2))

    class Twice(Function):
        """Works as often as it is run without autocast, and then no more."""

        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            if next(calls, None) is None:
                raise ValueError("no more")
            return x * 1

        @staticmethod
        def backward(_ctx: Any, grad: Tensor) -> Tensor:
            return grad

    message = message_of(Twice, square(4))
    assert message.startswith("Twice goes wrong in autocast regions, in 4 of 4 trials:\n  inputs float32;")
    assert message.endswith(
        "\nNeither custom_fwd nor running it in float32 helps; call it in a region with enabled=False."
    )


class Normalized(torch.autograd.Function):
    """Gives NaN for the gradient of a row of zeros, in any dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x / x.norm(dim=-1, keepdim=True)).float()


def test_nan_that_is_there_in_float32_too_is_not_blamed_on_autocast() -> None:
    x = square(4).index_fill(0, torch.tensor([1]), 0.0)
    assert check_function(Normalized, x, device_type="cpu", dtype=torch.bfloat16)


def test_a_function_that_fails_without_autocast_is_said_so() -> None:
    message = message_of(Product, square(4, 4), square(3, 3))
    assert message.startswith("Product fails with these arguments in float32 without autocast too: RuntimeError: ")


def test_what_is_no_function_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"^check_function takes a torch\.autograd\.Function subclass, got <built-in"):
        check_function(torch.relu, device_type="cpu")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="cpx"):
        check_function(Product, device_type="cpx")
