"""Threads that PyTorch starts, and what several threads do to each other through PyTorch's locks."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mezzo.torch
from mezzo.torch import autocast


class Deep(torch.autograd.Function):
    """A function whose backward runs a backward, down to a depth at which autograd moves on to another thread."""

    seen: list[tuple[int, str, torch.dtype]] = []

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth == 0:
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            Deep.seen.append((threading.get_ident(), mezzo.torch.active_policy("cpu").name, product.dtype))
        else:
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True)
                Deep.apply(inner, ctx.depth - 1).sum().backward()
        return grad, None


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this PyTorch cannot carry a policy safely")
def test_a_regions_policy_rules_in_the_threads_that_run_its_backward() -> None:
    Deep.seen.clear()
    with autocast("cpu", policy="fp32"):
        Deep.apply(torch.ones(1, requires_grad=True), 70).sum().backward()
    ((thread, policy, dtype),) = Deep.seen
    assert thread != threading.get_ident(), "autograd did not change threads, so this shows nothing"
    assert (policy, dtype) == ("fp32", torch.float32)
    Deep.seen.clear()
    with torch.autocast("cpu"):
        Deep.apply(torch.ones(1, requires_grad=True), 70).sum().backward()
    assert [(policy, dtype) for _, policy, dtype in Deep.seen] == [("torch", torch.bfloat16)], (
        "the policy is gone again"
    )


# Without care a thread that runs an op waits for the lock of PyTorch's weight cache with the GIL in hand, and a thread that
# empties the cache waits for the GIL with the lock in hand. In a process of its own, since a deadlock cannot be undone.
RACE = """
import torch, mezzo.torch
from concurrent.futures import ThreadPoolExecutor
from mezzo.torch import autocast

torch.set_num_threads(1)
with autocast("cpu", policy="fp32"):  # registers kernels for the ops below
    pass
net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 4))
x = torch.randn(2, 1, 8, 8)

def work(number):
    for _ in range(150):
        with (autocast("cpu", dtype=torch.bfloat16) if number % 2 else torch.autocast("cpu", dtype=torch.bfloat16)):
            net(x).float().sum().backward()
        torch.clear_autocast_cache()
    return True

with ThreadPoolExecutor(4) as pool:
    print(all(pool.map(work, range(4))))
"""


def test_threads_do_not_lock_each_other_up() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_ops_let_other_threads_run() -> None:
    """Mezzo's kernels give up the GIL while the op computes, as PyTorch's do."""
    x = torch.randn(512, 512)
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    def compute() -> None:
        for _ in range(100):
            with autocast("cpu", policy="fp32"):
                torch.linalg.svd(x[:64, :64])
                x @ x

    with ThreadPoolExecutor(1) as pool:
        ticking = pool.submit(tick)
        compute()
        stop.set()
        ticking.result()
    assert ticks > 20
