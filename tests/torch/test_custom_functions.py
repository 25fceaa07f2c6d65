"""`custom_fwd` and `custom_bwd`: the page's three kinds of autograd functions, and what backward runs under."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from mezzo.errors import RegionError
from mezzo.torch import active_policy, autocast, custom_bwd, custom_fwd

LOW = (torch.bfloat16, torch.float16)
low_dtypes = pytest.mark.parametrize("dtype", LOW, ids=str)
targets = pytest.mark.parametrize("target", [torch.float32, torch.float16], ids=str)
mezzo_pair = (
    functools.partial(custom_fwd, device_type="cpu"),
    functools.partial(custom_bwd, device_type="cpu"),
)
torch_pair = (
    functools.partial(torch.amp.custom_fwd, device_type="cpu"),
    functools.partial(torch.amp.custom_bwd, device_type="cpu"),
)


def matmul_function(pair: tuple[Any, Any], seen: list[Any] | None = None, **options: Any) -> type[Function]:
    """The page's ``MyMM``; notes the dtypes that its two passes compute with and the policy of the second."""
    fwd, bwd = pair
    notes = [] if seen is None else seen

    class MyMM(Function):
        @staticmethod
        @fwd(**options)
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            product = a.mm(b)
            notes.append(product.dtype)
            return product

        @staticmethod
        @bwd
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            left, right = gradient.mm(b.t()), a.t().mm(gradient)
            notes.append((left.dtype, torch.is_autocast_enabled("cpu"), active_policy("cpu").name))
            return left, right

    return MyMM


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(4, 4, dtype=dtype, requires_grad=True) for _ in range(2)]


def run(function: type[Function], region: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Apply the function in a region, go backward outside; return the output and the gradients."""
    a, b = leaves(dtype)
    with region:
        output = function.apply(a, b)
    output.float().square().sum().backward()
    return [output.detach(), a.grad, b.grad]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@low_dtypes
def test_function_one_cannot_change_is_called_in_a_disabled_region(dtype: torch.dtype) -> None:
    class OnlyFloat32(Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            assert a.dtype is b.dtype is torch.float32
            ctx.save_for_backward(a, b)
            return a.mm(b)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            return gradient.mm(b.t()), a.t().mm(gradient)

    a, b = leaves()
    with autocast("cpu", dtype=dtype, policy="unified"):
        low = a @ b
        with autocast("cpu", enabled=False):
            output = OnlyFloat32.apply(low.float(), b)
    output.sum().backward()
    assert low.dtype is dtype
    assert output.dtype is torch.float32
    assert torch.equal(output, low.detach().float().mm(b))
    assert a.grad.dtype is b.grad.dtype is torch.float32


@low_dtypes
@pytest.mark.parametrize("policy", [None, "torch", "unified", "fp32"])
def test_function_with_autocastable_ops(dtype: torch.dtype, policy: str | None) -> None:
    seen: list[Any] = []
    got = run(matmul_function(mezzo_pair, seen), autocast("cpu", dtype=dtype, policy=policy))
    computed = torch.float32 if policy == "fp32" else dtype
    assert seen == [computed, (computed, True, policy or "default")]
    if policy == "fp32":
        assert_same(got, run(matmul_function(mezzo_pair), autocast("cpu", enabled=False)))
    else:
        assert_same(got, run(matmul_function(torch_pair), torch.autocast("cpu", dtype=dtype)))


@low_dtypes
@targets
def test_function_that_needs_one_dtype(dtype: torch.dtype, target: torch.dtype) -> None:
    seen: list[Any] = []
    got = run(matmul_function(mezzo_pair, seen, cast_inputs=target), autocast("cpu", dtype=dtype, policy="unified"))
    expected = run(matmul_function(torch_pair, cast_inputs=target), torch.autocast("cpu", dtype=dtype))
    assert seen == [target, (target, False, "unified")]
    assert_same(got, expected)


@targets
def test_nothing_is_cast_outside_a_region(target: torch.dtype) -> None:
    seen: list[Any] = []
    run(matmul_function(mezzo_pair, seen, cast_inputs=target), autocast("cpu", enabled=False))
    assert seen == [torch.float32, (torch.float32, False, "default")]


def test_float64_is_not_cast_in_a_region() -> None:
    seen: list[Any] = []
    run(matmul_function(mezzo_pair, seen, cast_inputs=torch.float16), autocast("cpu"), torch.float64)
    assert seen[0] is torch.float64


@low_dtypes
@pytest.mark.parametrize(("forward", "backward"), [("fp32", "torch"), ("unified", "fp32"), (None, "fp32")])
def test_backward_in_another_region_has_the_state_and_policy_of_forward(
    dtype: torch.dtype, forward: str | None, backward: str
) -> None:
    seen: list[Any] = []
    function = matmul_function(mezzo_pair, seen)
    a, b = leaves()
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
    with autocast("cpu", dtype=dtype, policy=forward):
        loss = function.apply(a, b).float().square().sum()
    with autocast("cpu", dtype=other, policy=backward):
        loss.backward()
        assert active_policy("cpu").name == backward
    assert seen[1] == (torch.float32 if forward == "fp32" else dtype, True, forward or "default")
    if forward is None:
        expected = run(matmul_function(torch_pair), torch.autocast("cpu", dtype=dtype))
        assert_same([a.grad, b.grad], expected[1:])


def test_backward_of_a_forward_outside_runs_disabled_in_any_region() -> None:
    seen: list[Any] = []
    a, b = leaves()
    loss = matmul_function(mezzo_pair, seen).apply(a, b).sum()
    with autocast("cpu", policy="unified"):
        loss.backward()
    assert seen[1] == (torch.float32, False, "torch")


@pytest.mark.parametrize("decorator", [custom_fwd, custom_bwd])
def test_device_type_is_required_and_a_string(decorator: Any) -> None:
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'device_type'"):
        decorator(lambda ctx: None)
    with pytest.raises(ValueError, match=r"^Expected `device_type` of type `str`, got: `<class 'torch.device'>`$"):
        decorator(lambda ctx: None, device_type=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^Expected `device_type` of type `str`, got: `<class 'NoneType'>`$"):
        decorator(device_type=None)


@pytest.mark.parametrize("decorator", [custom_fwd, custom_bwd])
def test_bare_and_with_arguments_are_the_same_decorator(decorator: Any) -> None:
    def step(ctx: Any) -> str:
        """Say nothing."""
        return "ran"

    for decorated in (decorator(step, device_type="cpu"), decorator(device_type="cpu")(step)):
        assert decorated.__name__ == "step"
        assert decorated.__doc__ == "Say nothing."
        assert decorated.__wrapped__ is step


@pytest.mark.parametrize("region", [torch.autocast, autocast])
@low_dtypes
def test_pytorchs_decorators_work_in_a_region_of_mezzos_and_mezzos_in_pytorchs(region: Any, dtype: torch.dtype) -> None:
    expected = run(matmul_function(torch_pair), torch.autocast("cpu", dtype=dtype))
    for pair in (torch_pair, mezzo_pair):
        assert_same(run(matmul_function(pair), region("cpu", dtype=dtype)), expected)


def test_pytorchs_custom_bwd_runs_under_the_region_that_backward_is_called_in() -> None:
    """It knows enabled flag and dtype; the policy it meets is that of the caller."""
    seen: list[Any] = []
    a, b = leaves()
    function = matmul_function(torch_pair, seen)
    with autocast("cpu", policy="fp32"):
        loss = function.apply(a, b).sum()
        loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [torch.float32, (torch.float32, True, "fp32"), (torch.bfloat16, True, "torch")]


@low_dtypes
def test_decorated_function_in_a_training_step_of_a_module(dtype: torch.dtype) -> None:
    function = matmul_function(mezzo_pair)
    gradients = []
    for region in (autocast("cpu", dtype=dtype), torch.autocast("cpu", dtype=dtype)):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4) for _ in range(2)]
        with region:
            hidden = layers[0](torch.rand(4, 4))
            loss = layers[1](function.apply(hidden, hidden.relu())).float().square().mean()
        loss.backward()
        gradients.append([parameter.grad for layer in layers for parameter in layer.parameters()])
    assert_same(gradients[0], gradients[1])


def test_backward_without_a_decorated_forward_says_what_to_do() -> None:
    class OnlyBackward(Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RegionError, match="Decorate forward with custom_fwd; if the function has a setup_context"):
        OnlyBackward.apply(x).sum().backward()
