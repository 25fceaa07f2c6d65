"""Regions that several calls share, and every kind of callable that can be decorated."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.torch import autocast

LOW = (torch.bfloat16, torch.float16)
low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)
FULL = torch.float32


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


# One region, entered by several calls at a time


class Shared(nn.Module):
    """A module whose decorated ``forward`` calls that of another of its kind, as deep as wanted."""

    region = autocast("cpu", dtype=torch.bfloat16)
    off = autocast("cpu", enabled=False)

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Shared(depth - 1) if depth else None

    @region
    def forward(self, seen: list[torch.dtype]) -> list[torch.dtype]:
        if self.inner is not None:
            self.inner(seen)
        seen.append(product())
        return seen

    @off
    def in_full(self, seen: list[torch.dtype]) -> list[torch.dtype]:
        if self.inner is not None:
            self.inner.in_full(seen)
        seen.append(product())
        return seen


def test_nested_modules_that_share_a_decorated_forward_leave_nothing_behind() -> None:
    assert Shared(2)([]) == [torch.bfloat16] * 3
    assert product() is FULL
    assert not torch.is_autocast_enabled("cpu")


@low_dtypes
def test_nested_modules_that_switch_autocast_off_leave_the_region_around_them_on(low: torch.dtype) -> None:
    with autocast("cpu", dtype=low):
        assert Shared(2).in_full([]) == [FULL] * 3
        assert product() is low


@low_dtypes
def test_an_exception_from_the_depth_of_a_recursion_leaves_nothing_behind(low: torch.dtype) -> None:
    @autocast("cpu", dtype=low)
    def descend(depth: int) -> None:
        if depth == 0:
            raise KeyError(product())
        descend(depth - 1)

    with autocast("cpu", dtype=LOW[low is LOW[0]]):
        with pytest.raises(KeyError) as caught:
            descend(5)
        assert caught.value.args == (low,)
        assert product() is LOW[low is LOW[0]]


@low_dtypes
def test_threads_that_share_a_decorated_function_leave_it_in_any_order(low: torch.dtype) -> None:
    both_in, first_out = threading.Barrier(2, timeout=20), threading.Event()

    @autocast("cpu", dtype=low)
    def shared(number: int) -> torch.dtype:
        both_in.wait()
        if number == 1:
            assert first_out.wait(20)
        return product()

    def call(number: int) -> list[torch.dtype]:
        with autocast("cpu", enabled=number == 1, dtype=torch.bfloat16):
            found = [product(), shared(number), product()]
        first_out.set()
        return [*found, product()]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(call, range(2))
    assert first == [FULL, low, FULL, FULL]
    assert second == [torch.bfloat16, low, torch.bfloat16, FULL]


# Kinds of callables


def plain_kind(*_: Any) -> torch.dtype:
    """Say so."""
    return product()


def generator_kind(*_: Any) -> Iterator[torch.dtype]:
    """Say so."""
    yield product()


async def coroutine_kind(*_: Any) -> torch.dtype:
    """Say so."""
    return product()


async def async_generator_kind(*_: Any) -> Any:
    """Say so."""
    yield product()


async def first_of(generator: Any) -> Any:
    return await anext(generator)


def value_of(made: Any) -> Any:
    """Give the one value of a call, whatever the kind of the function."""
    if inspect.isgenerator(made):
        return next(made)
    if inspect.iscoroutine(made):
        return asyncio.run(made)
    return asyncio.run(first_of(made)) if inspect.isasyncgen(made) else made


KINDS = [plain_kind, generator_kind, coroutine_kind, async_generator_kind]
TESTS = [inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction]


class Callables:
    """The forms in which a function of each kind may come."""

    @staticmethod
    def function(function: Callable[..., Any]) -> Any:
        return function

    @staticmethod
    def partial(function: Callable[..., Any]) -> Any:
        return functools.partial(functools.partial(function, 1), 2)

    @staticmethod
    def bound_method(function: Callable[..., Any]) -> Any:
        return types.MethodType(function, object())

    @staticmethod
    def callable_object(function: Callable[..., Any]) -> Any:
        return type("Holder", (), {"__call__": function})()

    @staticmethod
    def module(function: Callable[..., Any]) -> Any:
        return type("Net", (nn.Module,), {"forward": function})()


@pytest.mark.parametrize("form", ["function", "partial", "bound_method", "callable_object", "module"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_callable_runs_in_the_region_in_every_form(kind: Callable[..., Any], form: str) -> None:
    decorated = autocast("cpu", dtype=torch.bfloat16)(getattr(Callables, form)(kind))
    assert [test(decorated) for test in TESTS] == [test(kind) for test in TESTS]
    assert value_of(decorated()) is torch.bfloat16
    assert product() is FULL


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_decorated_function_of_any_kind_keeps_its_name(kind: Callable[..., Any]) -> None:
    decorated = autocast("cpu")(kind)
    assert (decorated.__name__, decorated.__doc__, decorated.__module__) == (kind.__name__, "Say so.", __name__)
    assert decorated.__wrapped__ is kind
    assert vars(decorated)["__script_unsupported"] == "@autocast() decorator is not supported in script mode"


@pytest.mark.parametrize("outside", [True, False], ids=["over", "under"])
def test_static_and_class_methods_can_be_decorated_on_either_side(outside: bool) -> None:
    region = autocast("cpu", dtype=torch.bfloat16)

    def both(kind: Any) -> Callable[[Any], Any]:
        return lambda function: region(kind(function)) if outside else kind(region(function))

    class Holder:
        @both(staticmethod)
        def alone(x: int) -> Any:  # noqa: N805
            return x, product()

        @both(classmethod)
        def of_class(cls, x: int) -> Any:  # noqa: N805
            return cls, x, product()

        @both(staticmethod)
        def steps() -> Any:
            yield product()

    class Derived(Holder):
        pass

    assert Derived.alone(3) == Derived().alone(3) == (3, torch.bfloat16)
    assert Derived.of_class(3) == Derived().of_class(3) == (Derived, 3, torch.bfloat16)
    assert list(Holder.steps()) == [torch.bfloat16]
    assert product() is FULL
