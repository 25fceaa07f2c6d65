"""Regions as decorators, under TorchScript and inside generators: PyTorch's behaviour, checked on PyTorch first."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import mezzo.torch

LOW = (torch.bfloat16, torch.float16)
low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)
torchscript = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")


@pytest.fixture(params=[torch.autocast, mezzo.torch.autocast], ids=["torch", "mezzo"])
def autocast(request: pytest.FixtureRequest) -> Any:
    return request.param


def product() -> torch.Tensor:
    return torch.ones(2, 2) @ torch.ones(2, 2)


@low_dtypes
def test_a_decorated_function_keeps_its_name_and_arguments(autocast, low):
    @autocast("cpu", dtype=low)
    def double(x: torch.Tensor, *, times: int = 1) -> tuple[torch.dtype, torch.Tensor]:
        """Say so."""
        return product().dtype, x * 2 * times

    assert (double.__name__, double.__doc__) == ("double", "Say so.")
    assert double.__wrapped__(torch.ones(1))[0] == torch.float32
    dtype, doubled = double(torch.ones(1), times=2)
    assert (dtype, doubled.item()) == (low, 4)
    assert not torch.is_autocast_enabled("cpu")


@low_dtypes
def test_a_decorated_method_gets_its_instance(autocast, low):
    class Model(torch.nn.Module):
        @autocast("cpu", dtype=low)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(self, Model)
            return x @ x

    assert Model()(torch.ones(2, 2)).dtype == low


@low_dtypes
def test_a_decorated_class_is_constructed_in_the_region(autocast, low):
    @autocast("cpu", dtype=low)
    class Made:
        def __init__(self, x: torch.Tensor) -> None:
            self.product = x @ x

        def later(self) -> torch.dtype:
            return product().dtype

    made = Made(torch.ones(2, 2))
    assert isinstance(made, getattr(Made, "__wrapped__", Made))  # PyTorch gives back a function
    assert made.product.dtype == low
    assert made.later() == torch.float32


@pytest.mark.parametrize(("value", "name"), [(torch.ones(1), "Tensor"), (3, "int")])
def test_decorating_what_cannot_be_called_is_a_type_error(autocast, value, name):
    spelling = "torch" if autocast is torch.autocast else "mezzo.torch"
    with pytest.raises(TypeError) as caught:
        autocast("cpu")(value)
    assert str(caught.value) == (
        f"autocast()(func) requires a callable, but got {name}. Did you mean to use autocast as a context manager? For "
        f"example:\n    with {spelling}.autocast(device_type=...):\n        output = model(input)"
    )


@low_dtypes
def test_a_decorated_function_that_calls_itself_leaves_nothing_behind(low):
    @mezzo.torch.autocast("cpu", dtype=low)
    def descend(depth: int) -> list[torch.dtype]:
        below = [] if depth == 0 else descend(depth - 1)
        return [*below, product().dtype]

    assert descend(2) == [low] * 3
    assert not torch.is_autocast_enabled("cpu")


@torchscript
def test_a_decorated_function_cannot_be_scripted(autocast):
    @autocast("cpu")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(RuntimeError) as caught:
        torch.jit.script(double)
    assert str(caught.value) == "TorchScript error: @autocast() decorator is not supported in script mode"


@torchscript
@low_dtypes
def test_a_scripted_function_runs_in_the_region_around_it(autocast, low):
    @torch.jit.script
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    with autocast("cpu", dtype=low):
        assert multiply(torch.ones(2, 2)).dtype == low
    assert multiply(torch.ones(2, 2)).dtype == torch.float32


@low_dtypes
def test_a_region_around_a_yield_stays_set_while_the_generator_waits(autocast, low):
    def steps() -> Any:
        with autocast("cpu", dtype=low):
            yield product().dtype
            yield product().dtype

    generator = steps()
    assert next(generator) == low
    assert product().dtype == low  # PyTorch's behaviour, which context managers made from generators rely on
    assert list(generator) == [low]
    assert product().dtype == torch.float32


@low_dtypes
def test_a_region_in_a_generator_that_is_given_up_ends_when_it_is_closed(autocast, low):
    def steps() -> Any:
        with autocast("cpu", dtype=low):
            yield

    generator = steps()
    next(generator)
    del generator
    gc.collect()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
