"""Custom functions beyond ``forward(ctx, ...)`` with plain tensors: containers, ``setup_context``, `torch.func`."""

from __future__ import annotations

import functools
import re
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from mezzo.errors import RegionError
from mezzo.torch import active_policy, autocast, custom_bwd, custom_fwd

Pair = namedtuple("Pair", "left right")
fwd = functools.partial(custom_fwd, device_type="cpu")
bwd = functools.partial(custom_bwd, device_type="cpu")


def received(value: Any, **options: Any) -> Any:
    """Give what a decorated forward gets to see when it is called with a value in a region."""
    got: list[Any] = []

    class Look(Function):
        @staticmethod
        @fwd(**options)
        def forward(_ctx: Any, x: Tensor, argument: Any) -> Tensor:
            got.append(argument)
            return x.clone()

        @staticmethod
        @bwd
        def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient, None

    with autocast("cpu"):
        Look.apply(torch.ones(2, requires_grad=True), value).sum().backward()
    return got[0]


@pytest.mark.parametrize("target", [torch.float32, torch.float16], ids=str)
def test_containers_are_rebuilt_with_their_tensors_cast(target: torch.dtype) -> None:
    low = torch.ones(2, dtype=torch.bfloat16)
    look = functools.partial(received, cast_inputs=target)
    as_list, as_tuple, as_pair = look([low, 1]), look((low, [low])), look(Pair(low, "right"))
    as_mapping = look(OrderedDict(weight=low, name="weight"))
    assert type(as_list) is list
    assert as_list[0].dtype is target
    assert as_list[1] == 1
    assert type(as_tuple) is tuple
    assert as_tuple[0].dtype is as_tuple[1][0].dtype is target
    assert type(as_pair) is Pair
    assert as_pair.left.dtype is target
    assert as_pair.right == "right"
    assert isinstance(as_mapping, dict)
    assert list(as_mapping) == ["weight", "name"]
    assert as_mapping["weight"].dtype is target
    assert as_mapping["name"] == "weight"


@pytest.mark.parametrize(
    "value",
    [
        "text",
        b"bytes",
        None,
        7,
        np.ones(2, dtype=np.float32),
        {1, 2},
        range(3),
        torch.float32,
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.complex64),
        torch.empty(2, device="meta"),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_values_that_are_not_cast_arrive_as_they_are(value: Any) -> None:
    assert received(value, cast_inputs=torch.float16) is value


def test_containers_stay_as_they_are_without_cast_inputs() -> None:
    value = [torch.ones(2)]
    assert received(value) is value


def product(forward_decorator: Any, setup_decorator: Any, backward_decorator: Any, seen: list[Any]) -> type[Function]:
    """A matrix product in the style with ``setup_context``, the decorators given or `lambda f: f`."""

    class Product(Function):
        generate_vmap_rule = True

        @staticmethod
        @forward_decorator
        def forward(a: Tensor, b: Tensor) -> Tensor:
            return a.mm(b)

        @staticmethod
        @setup_decorator
        def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], _output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @backward_decorator
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            left, right = gradient.mm(b.t()), a.t().mm(gradient)
            seen.append((left.dtype, torch.is_autocast_enabled("cpu"), active_policy("cpu").name))
            return left, right

    return Product


def plain(function: Any) -> Any:
    return function


def run(function: type[Function], region: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    a, b = (torch.rand(4, 4).to(dtype).requires_grad_() for _ in range(2))
    with region:
        output = function.apply(a, b)
    output.float().square().sum().backward()
    return [output.detach(), a.grad, b.grad]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("policy", [None, "unified", "fp32"])
def test_setup_context_carries_the_state_to_backward(dtype: torch.dtype, policy: str | None) -> None:
    seen: list[Any] = []
    got = run(product(fwd(), fwd(), bwd(), seen), autocast("cpu", dtype=dtype, policy=policy))
    computed = torch.float32 if policy == "fp32" else dtype
    assert got[0].dtype is computed
    assert seen == [(computed, True, policy or "default")]


def test_setup_context_with_cast_inputs_runs_both_passes_disabled() -> None:
    seen: list[Any] = []
    decorate = fwd(cast_inputs=torch.float32)
    output, left, right = run(product(decorate, decorate, bwd(), seen), autocast("cpu"))
    reference = run(product(plain, plain, plain, []), autocast("cpu", enabled=False))
    assert seen == [(torch.float32, False, "default")]
    for one, other in zip((output, left, right), reference, strict=True):
        assert torch.equal(one, other)


def test_setup_context_with_cast_inputs_saves_what_forward_computed_with() -> None:
    """As in the other style, where forward saves its cast inputs: backward meets one dtype."""
    seen: list[Any] = []
    decorate = fwd(cast_inputs=torch.float32)
    output, left, _ = run(product(decorate, decorate, bwd(), seen), autocast("cpu"), torch.bfloat16)
    assert output.dtype is torch.float32
    assert seen == [(torch.float32, False, "default")]
    assert left.dtype is torch.bfloat16


def test_undecorated_setup_context_says_what_to_do() -> None:
    function = product(fwd(), plain, bwd(), [])
    advice = (
        "ProductBackward: backward has custom_bwd, but its context has no autocast state. Decorate forward with "
        "custom_fwd; if the function has a setup_context method, decorate that with custom_fwd too."
    )
    with pytest.raises(RegionError, match=f"^{re.escape(advice)}$"):
        run(function, autocast("cpu"))


@pytest.mark.parametrize("options", [{}, {"cast_inputs": torch.float32}], ids=["as-it-is", "cast-inputs"])
@pytest.mark.parametrize("enabled", [True, False])
def test_function_transforms_of_a_decorated_function(options: dict[str, Any], enabled: bool) -> None:
    decorate = fwd(**options)
    function = product(decorate, decorate, bwd(), [])
    torch.manual_seed(0)
    stack, b = torch.rand(3, 4, 4), torch.rand(4, 4)

    def loss(a: Tensor) -> Tensor:
        return function.apply(a, b).float().sum()

    low = torch.bfloat16 if enabled and not options else torch.float32
    with autocast("cpu", enabled=enabled):
        gradient = torch.func.grad(loss)(stack[0])
        outputs = torch.func.vmap(lambda a: function.apply(a, b))(stack)
        gradients = torch.func.vmap(torch.func.grad(loss))(stack)
    assert outputs.dtype is low
    # One product of four terms in bfloat16: 8 bits of mantissa, and a sum of at most 4.
    tolerance = 0.03 if low is torch.bfloat16 else 1e-6
    torch.testing.assert_close(outputs.float(), stack @ b, atol=tolerance, rtol=tolerance)
    expected = torch.ones(4, 4) @ b.t()
    torch.testing.assert_close(gradient.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(gradients.float(), expected.expand(3, 4, 4), atol=tolerance, rtol=tolerance)
