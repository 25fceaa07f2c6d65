"""`bind`: the whole state of autocast, in later calls and in other threads."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import autocast, bind, capture

from .situations import FULL, IN_FORCE, STATES, bind_to, softmax

LOW = (torch.bfloat16, torch.float16)
low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)


@pytest.mark.parametrize("name", STATES)
def test_a_bound_function_runs_in_its_state_wherever_it_is_called(name: str) -> None:
    bound = bind_to(STATES[name], softmax)
    assert bound() == IN_FORCE[name]
    for around in STATES.values():
        with around.restore():
            assert bound() == IN_FORCE[name]
            assert capture() == around
    assert softmax() == (FULL, FULL)


def test_a_bound_function_keeps_name_arguments_and_result() -> None:
    def scale(x: int, *, by: int = 2) -> int:
        """Say so."""
        return x * by

    bound = bind(scale)
    assert (bound(3), bound(3, by=5), bound.__name__, bound.__doc__) == (6, 15, "scale", "Say so.")
    assert bound.__wrapped__ is scale


def test_a_bound_function_that_calls_itself_or_raises_leaves_nothing_behind() -> None:
    with autocast("cpu", dtype=torch.float16, policy="unified"):

        @bind
        def descend(depth: int) -> Any:
            if depth == 0:
                raise KeyError(softmax())
            with autocast("cpu", policy="fp32"):
                descend(depth - 1)

    with pytest.raises(KeyError) as caught:
        descend(4)
    assert caught.value.args == ((torch.float16, FULL),)
    assert capture() == STATES["outside"]


def test_what_cannot_be_called_cannot_be_bound() -> None:
    with pytest.raises(TypeError) as caught:
        bind(torch.ones(1))
    assert str(caught.value) == (
        "bind(fn) requires a callable, got Tensor. Give it the function that is to be called later, not what it returns."
    )


def test_binding_a_class_makes_a_function_and_leaves_the_class_alone() -> None:
    class Made:
        def __init__(self) -> None:
            self.found = softmax()

    make = bind_to(STATES["unified"], Made)
    assert (make().found, Made().found) == (IN_FORCE["unified"], (FULL, FULL))
    assert isinstance(make(), Made)


def test_steps_of_bound_generators_and_coroutines_run_in_the_state_and_nothing_else_does() -> None:
    def steps() -> Any:
        while True:
            yield softmax()

    async def watch() -> list[Any]:
        found = []
        for _ in range(3):
            await asyncio.sleep(0)
            found.append(softmax())
        return found

    async def stream() -> Any:
        for _ in range(2):
            await asyncio.sleep(0)
            yield softmax()

    bound = bind_to(STATES["unified"], steps)
    assert inspect.isgeneratorfunction(bound)
    generator = bound()
    assert [next(generator), softmax(), next(generator)] == [IN_FORCE["unified"], (FULL, FULL), IN_FORCE["unified"]]

    async def main() -> Any:
        tasks = [bind_to(state, watch)() for state in STATES.values()]
        streamed = [(found, softmax()) async for found in bind_to(STATES["plain"], stream)()]
        return [*await asyncio.gather(*tasks, watch()), streamed]

    *watched, alone, streamed = asyncio.run(main())
    assert watched == [[found] * 3 for found in IN_FORCE.values()]
    assert alone == [(FULL, FULL)] * 3
    assert streamed == [(IN_FORCE["plain"], (FULL, FULL))] * 2


# Threads


@low_dtypes
def test_bound_work_has_the_state_in_every_kind_of_worker_thread(low: torch.dtype) -> None:
    found: list[Any] = []

    async def in_threads(work: Callable[[], Any]) -> list[Any]:
        loop = asyncio.get_running_loop()
        return [await asyncio.to_thread(work), await loop.run_in_executor(None, work)]

    with autocast("cpu", dtype=low, policy="unified"):
        bound = bind(softmax)
        thread = threading.Thread(target=bind(lambda: found.append(softmax())))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(2) as pool:
            found += [pool.submit(bound).result(), *pool.map(lambda _: bound(), range(2))]
            # A copied context carries nothing of it, neither PyTorch's state nor the policy.
            alone = pool.submit(contextvars.copy_context().run, softmax).result()
        found += asyncio.run(in_threads(bound))
    assert found == [(low, FULL)] * 6
    assert alone == (FULL, FULL)


def test_two_threads_run_one_bound_function_at_a_time_of_their_own() -> None:
    step = threading.Barrier(2, timeout=20)

    def work(region: Any) -> list[Any]:
        with region:
            step.wait()
            inside = bound()
            step.wait()
            return [inside, softmax()]

    def body() -> Any:
        step.wait()
        return softmax()

    bound = bind_to(STATES["unified"], body)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, [autocast("cpu", policy="fp32"), torch.autocast("cpu", dtype=torch.bfloat16)])
    assert first == [IN_FORCE["unified"], (FULL, FULL)]
    assert second == [IN_FORCE["unified"], (torch.bfloat16, torch.bfloat16)]


# Replicas


def parallel_apply(replicas: list[Callable[..., Any]], inputs: list[Tensor]) -> list[Any]:
    """Call each replica in a thread, with what PyTorch's function of this name carries there: the enabled flag."""
    enabled, results = torch.is_autocast_enabled("cpu"), [None] * len(replicas)

    def worker(place: int) -> None:
        with torch.autocast("cpu", enabled=enabled):
            results[place] = replicas[place](inputs[place])

    threads = [threading.Thread(target=worker, args=(place,)) for place in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Parallel(nn.Module):
    """Scatters a batch over replicas of a module, each in a thread of its own."""

    def __init__(self, module: nn.Module, *, carry: bool) -> None:
        super().__init__()
        self.module, self.carry = module, carry

    def forward(self, parts: list[Tensor]) -> list[Tensor]:
        replicas = [bind(self.module) if self.carry else self.module for _ in parts]
        return parallel_apply(replicas, parts)


@pytest.mark.parametrize("policy", ["unified", "fp32"])
def test_dtype_and_policy_reach_the_threads_of_replicas(policy: str) -> None:
    torch.manual_seed(0)
    net, parts = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 4)), list(torch.rand(6, 8).chunk(3))
    found = []
    for module in (lambda parts: [net(part) for part in parts], Parallel(net, carry=True), Parallel(net, carry=False)):
        with autocast("cpu", dtype=torch.float16, policy=policy):
            outputs = module(parts)
        net.zero_grad()
        torch.stack([output.float().square().sum() for output in outputs]).sum().backward()
        found.append((outputs, net[0].weight.grad))
    (serial, gradient), (carried, carried_gradient), (not_carried, _) = found
    for one, other in zip(carried, serial, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    # In threads the gradients are added up in another order, and not in float16, for each thread has its own cast.
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if policy == "unified" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(carried_gradient, gradient, **tolerance)
    # What the threads have without it: another dtype, and PyTorch's rules.
    assert [output.dtype for output in not_carried] == [torch.bfloat16] * 3


@pytest.mark.gpu
def test_dtype_and_policy_reach_the_threads_of_pytorchs_parallel_apply() -> None:
    net, x = nn.Linear(8, 8).cuda(), torch.rand(4, 8, device="cuda")
    with autocast("cuda", dtype=torch.bfloat16, policy="fp32"):
        carried = nn.parallel.parallel_apply([bind(net), bind(net)], [x, x], devices=[0, 0])
    with autocast("cuda", dtype=torch.bfloat16, policy="unified"):
        low = nn.parallel.parallel_apply([bind(net), bind(net)], [x, x], devices=[0, 0])
    assert [output.dtype for output in [*carried, *low]] == [FULL, FULL, torch.bfloat16, torch.bfloat16]
