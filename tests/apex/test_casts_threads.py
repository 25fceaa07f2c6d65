"""Which threads and processes O1 is on in: those that call a watched model."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from mezzo.apex.amp import casts
from mezzo.apex.amp.cast_state import HERE, nesting

T = TypeVar("T")


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    """One thread that stays for the test."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def start(low: torch.dtype = torch.float16) -> casts.Handle:
    return casts.start(["cpu"], low, {})


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def in_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def watched() -> nn.Module:
    net = nn.Linear(2, 2)
    casts.watch_model(net)
    return net


def test_a_thread_that_calls_no_watched_model_is_untouched() -> None:
    start()
    unwatched = nn.Linear(2, 2)
    assert in_thread(lambda: (product(), unwatched(torch.ones(1, 2)).dtype)) == (torch.float32, torch.float32)


def test_a_thread_that_calls_a_watched_model_is_in() -> None:
    net = watched()
    start()
    found = in_thread(lambda: (net(torch.ones(1, 2)).dtype, product(), nesting()))
    assert found == (torch.float16, torch.float16, 1)


def test_other_threads_notice_that_o1_has_ended(worker: ThreadPoolExecutor) -> None:
    net = watched()
    start()
    assert worker.submit(lambda: net(torch.ones(1, 2)).dtype).result() is torch.float16
    casts.stop()
    assert worker.submit(lambda: net(torch.ones(1, 2)).dtype).result() is torch.float32
    assert worker.submit(lambda: (product(), nesting(), HERE.regions)).result() == (torch.float32, 0, [])


def test_other_threads_notice_that_o1_was_started_anew(worker: ThreadPoolExecutor) -> None:
    net = watched()
    start()
    assert worker.submit(lambda: net(torch.ones(1, 2)).dtype).result() is torch.float16
    start(torch.bfloat16)
    assert worker.submit(lambda: net(torch.ones(1, 2)).dtype).result() is torch.bfloat16
    casts.stop()
    worker.submit(casts.ensure_here).result()


def test_casts_disabled_in_one_thread_are_on_in_others() -> None:
    net = watched()
    start()
    with casts.disable_casts():
        assert in_thread(lambda: (net(torch.ones(1, 2)).dtype, casts.casts_active())) == (torch.float16, True)
    assert in_thread(lambda: disabled_around(net)) == (torch.float32, torch.float16)
    assert product() is torch.float16


def disabled_around(net: nn.Module) -> tuple[torch.dtype, torch.dtype]:
    """Call a model in a thread that has disabled casts before it was ever in."""
    with casts.disable_casts():
        inside = net(torch.ones(1, 2)).dtype
    return inside, product()


def test_many_threads_train_at_a_time() -> None:
    start()
    nets = [watched() for _ in range(4)]
    barrier = threading.Barrier(4)

    def train(net: nn.Module) -> bool:
        barrier.wait()
        for _ in range(20):
            loss = net(torch.ones(1, 2)).float().sum()
            with casts.without_casts():
                loss.backward()
                torch.optim.SGD(net.parameters(), lr=0.1).step()
        return product() is torch.float16

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(train, nets))
    # Each of 20 steps of 1, 2, 3 ... added ones to the gradient.
    assert all(torch.equal(net.weight.grad, torch.full((2, 2), 20.0)) for net in nets)


def test_replicas_in_threads_are_cast() -> None:
    """As `torch.nn.DataParallel` runs them: shallow copies of a model, each in a new thread with a region of its own."""
    net = watched()
    replica = net._replicate_for_data_parallel()
    replica.weight, replica.bias = net.weight.detach(), net.bias.detach()
    start()

    def run() -> tuple[torch.dtype, Any]:
        with torch.autocast("cpu", enabled=True):
            return replica(torch.ones(1, 2)).dtype, casts.casts_active()

    assert in_thread(run) == (torch.float16, True)


# Backward passes


class Look(torch.autograd.Function):
    """Notes what its backward computes in."""

    seen: list[tuple[torch.dtype, bool]] = []

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        Look.seen.append((product(), torch.is_autocast_enabled("cpu")))
        return grad


def test_a_backward_pass_runs_as_the_thread_that_calls_it_has_it() -> None:
    start()
    Look.seen.clear()
    loss = Look.apply(torch.ones(1, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    with casts.without_casts():
        loss.backward(retain_graph=True)
    in_thread(lambda: loss.backward(retain_graph=True))
    assert Look.seen == [(torch.float16, True), (torch.float32, False), (torch.float32, False)]


def test_a_watched_model_called_in_a_backward_pass_of_another_thread_leaves_no_region_there() -> None:
    net = watched()
    start()
    x = torch.ones(1, 2, requires_grad=True)
    y = x.clone()
    y.register_hook(lambda grad: net(grad).detach())

    def backward() -> tuple[int, object]:
        y.sum().backward()
        return nesting(), HERE.started

    assert in_thread(backward) == (0, None)


# Other processes: forked from one of its own, since a fork takes along what other tests have left to PyTorch's threads

FORKED = """
import os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from mezzo.apex.amp import casts
from mezzo.apex.amp.cast_state import nesting

class Products(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, place):
        return torch.ones(2, 2) @ torch.ones(2, 2)

torch.set_num_threads(1)
net = nn.Linear(2, 2)
casts.watch_model(net)
casts.start(["cpu"], torch.float16, {})
if sys.argv[1] == "loader":
    loader = DataLoader(Products(), num_workers=1, multiprocessing_context="fork", timeout=30)
    assert {batch.dtype for batch in loader} == {torch.float32}
else:
    child = os.fork()
    if child == 0:
        untouched = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32 and nesting() == 0
        os._exit(0 if untouched and net(torch.ones(1, 2)).dtype is torch.float16 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which this system lacks")
@pytest.mark.parametrize("what", ["loader", "fork"])
def test_a_forked_process_is_untouched_until_it_calls_a_watched_model(what: str) -> None:
    subprocess.run([sys.executable, "-c", FORKED, what], check=True, timeout=60)
