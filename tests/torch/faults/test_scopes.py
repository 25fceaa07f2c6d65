"""Section B: state that leaks out of a region, or does not reach into it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .amps import OTHER, Amp, assert_near, low_dtypes, off

A, B = torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(1, 2, 16).view(4, 4).sqrt()


def product() -> Tensor:
    return A @ B


def assert_off() -> None:
    assert off()
    assert_near(product(), A.double() @ B.double(), torch.float32)


def assert_on(result: Tensor, low: torch.dtype) -> None:
    assert_near(result, A.double() @ B.double(), low)


# B1, top 15 no. 10: one instance, entered again while it is open


@low_dtypes
def test_b1_one_instance_entered_twice(amp: Amp, low: torch.dtype) -> None:
    """B1: after the outer exit of a region that was entered again inside, autocast is off."""
    region = amp.region(low)
    with region:
        with region:
            assert_on(product(), low)
        assert_on(product(), low)
    assert_off()


@low_dtypes
def test_b1_modules_inside_each_other_share_a_decorated_forward(amp: Amp, low: torch.dtype) -> None:
    """B1: after a call of nested modules of one class, whose forward is decorated, autocast is off."""

    class Block(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.inner: nn.Module = Block(depth - 1) if depth else nn.Identity()

        @amp.region(low)
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.inner(x))

    net = Block(2)
    reference = net.linear(net.inner.linear(net.inner.inner.linear(A)))
    assert_near(net(A), reference, low)
    assert_off()


@low_dtypes
def test_b1_modules_that_turn_autocast_off_leave_the_region_around_on(amp: Amp, low: torch.dtype) -> None:
    """B1: nested modules whose forward turns autocast off do not turn it off for their caller."""

    class Exact(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        @amp.region(low, enabled=False)
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) @ B

    # One decorator for the class, so one instance of the region for both modules.
    net = Exact(Exact(nn.Identity()))
    with amp.region(low):
        assert_near(net(A), A.double() @ B.double() @ B.double(), torch.float32)
        assert_on(product(), low)


@low_dtypes
def test_b1_a_decorated_function_calls_itself(amp: Amp, low: torch.dtype) -> None:
    """B1: a recursive decorated function leaves autocast as it was, by an exception too."""

    @amp.region(low)
    def descend(depth: int) -> Tensor:
        return descend(depth - 1) if depth else product()

    @amp.region(low)
    def fail(depth: int) -> Tensor:
        if depth:
            return fail(depth - 1)
        raise LookupError

    assert_on(descend(3), low)
    assert_off()
    with pytest.raises(LookupError):
        fail(3)
    assert_off()


@low_dtypes
def test_b1_threads_share_a_decorator(amp: Amp, low: torch.dtype) -> None:
    """B1: another thread in the same instance does not change what this one finds when it leaves."""
    exact = amp.region(low, enabled=False)

    def enter_and_leave() -> None:
        with exact:
            pass

    with amp.region(low):
        with exact:
            thread = threading.Thread(target=enter_and_leave)
            thread.start()
            thread.join()
        assert_on(product(), low)


# B2, top 15 no. 10: what is suspended. mezzo's answer is the decorator; a plain `with` around a `yield` stays PyTorch's,
# since context managers written as generators depend on it (docs/scopes.md).


@low_dtypes
def test_b2_decorated_generator(amp: Amp, low: torch.dtype) -> None:
    """B2: the steps of a decorated generator run in the region, and its consumer's code does not."""

    @amp.region(low)
    def products() -> Iterator[Tensor]:
        for _ in range(3):
            yield product()

    found = []
    for result in products():
        assert_off()
        found.append(result)
    assert len(found) == 3
    for result in found:
        assert_on(result, low)


@low_dtypes
def test_b2_decorated_generator_that_is_left_early(amp: Amp, low: torch.dtype) -> None:
    """B2: a generator that is abandoned half way leaves nothing behind, and its clean-up runs in the region."""
    cleaned: list[Tensor] = []

    @amp.region(low)
    def products() -> Iterator[Tensor]:
        try:
            while True:
                yield product()
        finally:
            cleaned.append(product())

    started = products()
    assert_on(next(started), low)
    assert_off()
    started.close()
    assert_on(cleaned[0], low)
    assert_off()


@low_dtypes
def test_b2_decorated_coroutine(amp: Amp, low: torch.dtype) -> None:
    """B2: a decorated coroutine computes in the region, before and after it has waited; other tasks do not."""

    @amp.region(low)
    async def serve() -> list[Tensor]:
        first = product()
        await asyncio.sleep(0)
        return [first, product()]

    async def bystander() -> bool:
        await asyncio.sleep(0)
        return off()

    async def main() -> Any:
        return await asyncio.gather(serve(), bystander(), serve(), bystander())

    first, off_in_between, second, off_after = asyncio.run(main())
    for result in (*first, *second):
        assert_on(result, low)
    assert off_in_between
    assert off_after


@low_dtypes
def test_b2_interleaved_tasks_of_different_dtypes(amp: Amp, low: torch.dtype) -> None:
    """B2: two tasks that take turns have each their own dtype."""

    def task_in(dtype: torch.dtype) -> Any:
        @amp.region(dtype)
        async def task() -> list[Tensor]:
            found = []
            for _ in range(3):
                found.append(product())
                await asyncio.sleep(0)
            return found

        return task()

    async def main() -> Any:
        return await asyncio.gather(task_in(low), task_in(OTHER[low]))

    for results, dtype in zip(asyncio.run(main()), (low, OTHER[low]), strict=True):
        for result in results:
            assert_on(result, dtype)
    assert_off()


@low_dtypes
def test_b2_decorated_asynchronous_generator(amp: Amp, low: torch.dtype) -> None:
    """B2: the steps of a decorated asynchronous generator run in the region, and the loop over it does not."""

    @amp.region(low)
    async def stream() -> AsyncIterator[Tensor]:
        for _ in range(2):
            await asyncio.sleep(0)
            yield product()

    async def consume() -> list[Tensor]:
        found = []
        async for result in stream():
            assert off()
            found.append(result)
        return found

    found = asyncio.run(consume())
    assert len(found) == 2
    for result in found:
        assert_on(result, low)


# B5: the device type that a region names


@low_dtypes
def test_b5_one_region_for_all_devices(amp: Amp, low: torch.dtype) -> None:
    """B5: a region need not name the device; mezzo's ``"auto"`` covers the CPU too, whatever else is there."""
    layer = nn.Linear(4, 4)
    with amp.everywhere(low):
        assert_on(product(), low)
        result = layer(A)
    assert_near(result, layer(A), low)


@low_dtypes
def test_b5_float32_region_on_the_cpu(amp: Amp, low: torch.dtype) -> None:
    """B5: a region of float32 is one on the CPU as well: mezzo's policy ``"fp32"``, where PyTorch warns and disables."""
    with amp.float32_region():
        result = torch.mm(A.to(low), B)
    assert_near(result, A.to(low).double() @ B.double(), torch.float32)


# B9: full precision inside a region


@low_dtypes
def test_b9_island_takes_lower_precision_activations(amp: Amp, low: torch.dtype) -> None:
    """B9: float32 layers inside an island take what comes out of the region; mezzo's island is the policy ``"fp32"``."""
    first, head = nn.Linear(4, 4), nn.Linear(4, 2)
    with amp.region(low):
        hidden = first(A)
        with amp.island():
            result = head(hidden)
        after = first(A)
    assert hidden.dtype is low
    reference = nn.functional.linear(hidden.double(), head.weight.double(), head.bias.double())
    assert_near(result, reference, torch.float32)
    assert_near(after, first(A), low)


@low_dtypes
def test_b9_gradients_of_an_island(amp: Amp, low: torch.dtype) -> None:
    """B9: gradients go through an island and back into the region around it."""
    first, head = nn.Linear(4, 4), nn.Linear(4, 2)
    reference = torch.autograd.grad(head(first(A)).square().sum(), [first.weight, head.weight])
    with amp.region(low):
        hidden = first(A)
        with amp.island():
            loss = head(hidden).square().sum()
    loss.backward()
    for layer, wanted in zip((first, head), reference, strict=True):
        assert_near(layer.weight.grad, wanted, torch.float32, computed=low)
