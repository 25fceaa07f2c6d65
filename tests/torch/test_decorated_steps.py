"""Decorated generators, asynchronous ones too: each step is in the region, and nothing else."""

from __future__ import annotations

import asyncio
import copy
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import mezzo.torch
from mezzo.torch import autocast

LOW = (torch.bfloat16, torch.float16)
low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)
FULL = torch.float32


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


# Generators


@low_dtypes
def test_a_decorated_generator_runs_in_the_region_and_its_consumer_does_not(low: torch.dtype) -> None:
    @autocast("cpu", dtype=low, policy="unified")
    def steps(times: int) -> Iterator[tuple[torch.dtype, str]]:
        for _ in range(times):
            yield product(), mezzo.torch.active_policy("cpu").name

    seen = []
    for found in steps(3):
        assert found == (low, "unified")
        seen.append((product(), mezzo.torch.active_policy("cpu").name))
    assert seen == [(FULL, "torch")] * 3


@low_dtypes
def test_a_region_of_the_consumer_is_left_alone_by_a_decorated_generator(low: torch.dtype) -> None:
    @autocast("cpu", enabled=False)
    def steps() -> Iterator[torch.dtype]:
        while True:
            yield product()

    generator = steps()
    with autocast("cpu", dtype=low):
        assert [next(generator), product(), next(generator), product()] == [FULL, low, FULL, low]
    assert [next(generator), product()] == [FULL, FULL]


@low_dtypes
def test_interleaved_generators_do_not_see_each_other(low: torch.dtype) -> None:
    def steps() -> Iterator[torch.dtype]:
        yield product()
        yield product()

    other = LOW[low is LOW[0]]
    one, two, plain = autocast("cpu", dtype=low)(steps)(), autocast("cpu", dtype=other)(steps)(), steps()
    assert list(zip(one, two, plain, strict=True)) == [(low, other, FULL)] * 2


def test_a_decorated_generator_may_go_on_in_another_thread() -> None:
    @autocast("cpu", dtype=torch.bfloat16)
    def steps() -> Iterator[torch.dtype]:
        while True:
            yield product()

    generator = steps()
    found = [next(generator)]
    with ThreadPoolExecutor(1) as pool:
        found.append(pool.submit(next, generator).result())
        assert pool.submit(product).result() is FULL
    assert [*found, next(generator)] == [torch.bfloat16] * 3


def echo(log: list[Any]) -> Any:
    """Yields what came last, and lives through everything but a ``GeneratorExit``."""
    came: Any = "started"
    try:
        while came != "stop":
            try:
                came = yield came
            except LookupError as error:
                came = f"{type(error).__name__} in {product()}"
        return "returned"
    finally:
        log.append(f"cleaned up in {product()}")


def stubborn(log: list[Any]) -> Any:
    """Yields once more when it is told to end."""
    try:
        yield 1
    except GeneratorExit:
        yield 2


def breaking(log: list[Any]) -> Any:
    """Raises errors of its own."""
    try:
        yield 1
    except KeyError:
        log.append("handled")
    yield 2
    raise ValueError("mine")


def delegating(log: list[Any]) -> Any:
    result = yield from echo(log)
    log.append(result)
    yield "after"
    return result


SCRIPTS: list[list[tuple[str, Any]]] = [
    [("send", None), ("send", 7), ("throw", KeyError("a")), ("send", "stop"), ("send", None)],
    [("send", 7), ("send", None), ("throw", ValueError("b")), ("send", None)],
    [("send", None), ("close", None), ("send", None), ("close", None)],
    [("send", None), ("throw", KeyError("a")), ("send", None), ("send", None), ("send", None)],
    [("send", None), ("throw", GeneratorExit()), ("send", None)],
    [("send", None), ("throw", StopIteration(3)), ("send", None)],
    [("throw", KeyError("early")), ("send", None)],
    [("close", None), ("send", None)],
]


def transcript(function: Callable[..., Any], script: list[tuple[str, Any]]) -> list[Any]:
    """Do to a generator what a script says; give what came back, errors with their context, and what it logged."""
    log: list[Any] = []
    generator = function(log)
    for verb, argument in script:
        error = copy.copy(argument) if isinstance(argument, BaseException) else argument
        try:
            log.append(getattr(generator, verb)(*([] if verb == "close" else [error])))
        except BaseException as raised:
            context = raised.__context__
            log.append((type(raised), raised.args, raised.__cause__ is None, type(context)))
    return log


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: "-".join(verb for verb, _ in script))
@pytest.mark.parametrize("body", [echo, stubborn, breaking, delegating])
def test_a_decorated_generator_answers_as_the_plain_one(body: Callable[..., Any], script: list[Any]) -> None:
    with autocast("cpu", dtype=torch.bfloat16):
        expected = transcript(body, script)
    assert transcript(autocast("cpu", dtype=torch.bfloat16)(body), script) == expected


def test_the_context_of_an_error_that_comes_later_is_not_what_was_thrown_in() -> None:
    generator = autocast("cpu")(breaking)([])
    next(generator)
    assert generator.throw(KeyError("handled inside")) == 2
    with pytest.raises(ValueError, match="mine") as caught:
        next(generator)
    assert caught.value.__context__ is None


def test_a_decorated_generator_that_is_given_up_cleans_up_in_the_region() -> None:
    log: list[Any] = []
    generator = autocast("cpu", dtype=torch.bfloat16)(echo)(log)
    next(generator)
    del generator
    gc.collect()
    assert log == ["cleaned up in torch.bfloat16"]
    assert product() is FULL


class MineError(Exception):
    pass


@types.coroutine
def pause() -> Any:
    yield "paused"


async def paused() -> None:
    await pause()


async def async_paused() -> Any:
    await pause()
    yield


async def one_value() -> Any:
    yield 1


def freed(throw: Callable[[Any], Any]) -> bool:
    """Say whether an error that is thrown in and comes out again is gone at once."""

    def error() -> Any:
        try:
            throw(MineError())
        except MineError as error:
            return weakref.ref(error)

    gc.collect()
    gc.disable()
    try:
        return error()() is None
    finally:
        gc.enable()


def test_an_error_that_passed_through_something_decorated_is_freed_with_its_last_reference() -> None:
    """It could hold a graph of tensors, which a collection of garbage may come too late for."""
    region = autocast("cpu")
    generator = region(echo)([])
    next(generator)
    assert freed(generator.throw)
    coroutine = region(paused)()
    assert coroutine.send(None) == "paused"
    assert freed(coroutine.throw)
    step = region(async_paused)().asend(None)
    assert step.send(None) == "paused"
    assert freed(step.throw)
    stream = region(one_value)()
    with pytest.raises(StopIteration):
        stream.asend(None).send(None)
    step = stream.athrow(MineError)
    assert freed(lambda _: step.send(None))


# Asynchronous generators


def test_a_decorated_async_generator_runs_in_the_region_and_its_consumer_does_not() -> None:
    @autocast("cpu", dtype=torch.bfloat16)
    async def steps(times: int) -> Any:
        for _ in range(times):
            await asyncio.sleep(0)
            yield product()

    async def consume() -> list[tuple[torch.dtype, torch.dtype]]:
        return [(found, product()) async for found in steps(3)]

    async def main() -> Any:
        return await asyncio.gather(consume(), consume())

    assert asyncio.run(main()) == [[(torch.bfloat16, FULL)] * 3] * 2


async def async_echo(log: list[Any]) -> Any:
    came: Any = "started"
    try:
        while came != "stop":
            try:
                await asyncio.sleep(0)
                came = yield came
            except LookupError as error:
                came = f"{type(error).__name__} in {product()}"
    finally:
        await asyncio.sleep(0)
        log.append(f"cleaned up in {product()}")


async def async_stubborn(log: list[Any]) -> Any:
    try:
        yield 1
    except GeneratorExit:
        yield 2


async def async_transcript(function: Callable[..., Any], script: list[tuple[str, Any]]) -> list[Any]:
    log: list[Any] = []
    generator = function(log)
    for verb, argument in script:
        error = copy.copy(argument) if isinstance(argument, BaseException) else argument
        try:
            log.append(await getattr(generator, f"a{verb}")(*([] if verb == "close" else [error])))
        except BaseException as raised:
            log.append((type(raised), raised.args, type(raised.__context__)))
    return log


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: "-".join(verb for verb, _ in script))
@pytest.mark.parametrize("body", [async_echo, async_stubborn])
def test_a_decorated_async_generator_answers_as_the_plain_one(body: Callable[..., Any], script: list[Any]) -> None:
    async def plain() -> list[Any]:
        with autocast("cpu", dtype=torch.bfloat16):
            return await async_transcript(body, script)

    expected = asyncio.run(plain())
    assert asyncio.run(async_transcript(autocast("cpu", dtype=torch.bfloat16)(body), script)) == expected


@pytest.mark.parametrize("held", [True, False], ids=["until the loop ends", "until then"])
def test_a_decorated_async_generator_that_is_given_up_cleans_up_in_the_region(held: bool) -> None:
    log: list[Any] = []

    async def main() -> None:
        generator = autocast("cpu", dtype=torch.bfloat16)(async_echo)(log)
        async for _ in generator:
            break
        if held:
            kept.append(generator)
            return
        del generator
        gc.collect()
        await asyncio.sleep(0.01)
        assert log != []

    kept: list[Any] = []
    asyncio.run(main())
    assert log == ["cleaned up in torch.bfloat16"]
