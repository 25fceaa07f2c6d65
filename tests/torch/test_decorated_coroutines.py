"""Decorated coroutines: each step is in the region, and no other task."""

from __future__ import annotations

import asyncio
import inspect
import types
from typing import Any

import pytest
import torch

from mezzo.torch import autocast

LOW = (torch.bfloat16, torch.float16)
low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)
FULL = torch.float32


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@low_dtypes
def test_a_decorated_coroutine_runs_in_the_region_and_other_tasks_do_not(low: torch.dtype) -> None:
    other = LOW[low is LOW[0]]

    async def watch() -> list[torch.dtype]:
        found = []
        for _ in range(5):
            found.append(product())
            await asyncio.sleep(0)
        return found

    async def main() -> list[list[torch.dtype]]:
        return await asyncio.gather(
            autocast("cpu", dtype=low)(watch)(), watch(), autocast("cpu", dtype=other, policy="fp32")(watch)(), watch()
        )

    assert asyncio.run(main()) == [[low] * 5, [FULL] * 5, [FULL] * 5, [FULL] * 5]


def test_coroutines_await_each_other_each_in_its_own_region() -> None:
    @autocast("cpu", dtype=torch.float16)
    async def inner() -> torch.dtype:
        await asyncio.sleep(0.001)
        return product()

    @autocast("cpu", dtype=torch.bfloat16)
    async def outer(depth: int) -> list[torch.dtype]:
        below = await outer(depth - 1) if depth else []
        return [product(), await inner(), *below, product()]

    async def main() -> list[torch.dtype]:
        return [product(), *await outer(1), product()]

    low, other = torch.bfloat16, torch.float16
    assert asyncio.run(main()) == [FULL, low, other, low, other, low, low, FULL]


def test_a_decorated_coroutine_returns_raises_and_is_cancelled_as_a_plain_one() -> None:
    log: list[Any] = []

    @autocast("cpu", dtype=torch.bfloat16)
    async def body(what: str) -> str:
        try:
            await asyncio.sleep(0 if what != "wait" else 60)
            if what == "raise":
                raise KeyError(what)
            return what
        except asyncio.CancelledError:
            log.append(("cancelled", product()))
            await asyncio.sleep(0)
            raise
        finally:
            log.append(product())

    async def main() -> list[Any]:
        waiting = asyncio.create_task(body("wait"))
        await asyncio.sleep(0)
        waiting.cancel()
        results = await asyncio.gather(body("return"), body("raise"), waiting, return_exceptions=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(body("wait"), 0.001)
        return [*results, product()]

    returned, raised, cancelled, dtype = asyncio.run(main())
    assert returned == "return"
    assert isinstance(raised, KeyError)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert dtype is FULL
    assert log.count(torch.bfloat16) == 4
    assert log.count(("cancelled", torch.bfloat16)) == 2


def test_an_awaitable_made_by_a_generator_can_be_awaited_when_decorated() -> None:
    @autocast("cpu", dtype=torch.bfloat16)
    @types.coroutine
    def step() -> Any:
        yield
        return product()

    async def main() -> torch.dtype:
        return await step()

    assert asyncio.run(main()) is torch.bfloat16


@pytest.mark.skipif(not hasattr(inspect, "markcoroutinefunction"), reason="this Python cannot mark functions")
def test_what_a_marked_function_does_before_it_gives_its_coroutine_runs_in_the_region_too() -> None:
    async def later(found: torch.dtype) -> list[torch.dtype]:
        return [found, product()]

    marked = inspect.markcoroutinefunction(lambda: later(product()))
    assert asyncio.run(autocast("cpu", dtype=torch.bfloat16)(marked)()) == [torch.bfloat16] * 2
