"""Rules of `set_precision` in recursive, concurrent, failing and interrupted calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import active_policy, autocast, set_precision

from .named_model import Seen


class Recursive(Seen):
    def __init__(self, failing: int = -1) -> None:
        super().__init__()
        self.failing = failing
        self.policies: list[str] = []

    def forward(self, depth: int) -> Tensor:
        if depth == self.failing:
            raise ValueError(depth)
        result = self(depth - 1) if depth else torch.ones(1)
        self.policies.append(active_policy("cpu").name)
        return result


def test_a_module_may_call_itself() -> None:
    module = Recursive()
    set_precision(module, {"": {"softmax": "fp32"}})
    with autocast("cpu", policy="torch"):
        module(3)
        assert active_policy("cpu").name == "torch"
    assert module.policies == ["torch+"] * 4


def test_threads_do_not_see_each_other() -> None:
    module, barrier = Recursive(), threading.Barrier(2)
    module.register_forward_hook(lambda *_: barrier.wait(10) and None)
    set_precision(module, {"": {"softmax": "fp32"}})
    after: list[str] = []

    def run(policy: str) -> None:
        with autocast("cpu", policy=policy):
            module(2)
            after.append(active_policy("cpu").name)

    threads = [threading.Thread(target=run, args=(policy,)) for policy in ("torch", "unified")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(module.policies) == ["torch+"] * 3 + ["unified+"] * 3
    assert sorted(after) == ["torch", "unified"]


def test_an_exception_in_forward_ends_the_policy() -> None:
    module = Recursive(failing=1)
    set_precision(module, {"": "fp32"})
    with autocast("cpu", policy="torch"):
        with pytest.raises(ValueError, match=r"^1$"):
            module(3)
        assert active_policy("cpu").name == "torch"
        module.failing = -1
        module(0)
    assert module.policies == ["fp32"]


@pytest.mark.parametrize("when", ["before", "after", "earlier call"])
def test_an_exception_in_another_hook_ends_the_policy(when: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError(when)

    module = Seen()
    if when == "after":
        module.register_forward_hook(fail)
    if when == "before":
        module.register_forward_pre_hook(fail)
    set_precision(module, {"": "fp32"})
    if when == "earlier call":
        module.register_forward_pre_hook(fail, prepend=True)
    with autocast("cpu", policy="torch"):
        with pytest.raises(ValueError, match=f"^{when}$"):
            module()
        assert active_policy("cpu").name == "torch"


class Interrupted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


class Catching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Interrupted()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except KeyboardInterrupt:
            return x


def test_the_module_around_an_interrupted_one_leaves_both() -> None:
    net = Catching()
    set_precision(net, {"": "torch", "inner": "fp32"})
    with autocast("cpu", policy="unified"):
        net(torch.ones(1))
        assert active_policy("cpu").name == "unified"


def test_the_region_around_an_interrupted_module_leaves_it() -> None:
    net = Interrupted()
    set_precision(net, {"": "fp32"})
    with pytest.raises(KeyboardInterrupt), autocast("cpu", policy="torch"):
        net(torch.ones(1))
    # That nothing is left is what the tests' own fixture asserts.
    assert not torch.is_autocast_enabled("cpu")


def test_pytorchs_region_around_an_interrupted_module_leaves_it() -> None:
    net = Interrupted()
    set_precision(net, {"": "fp32"})
    before = active_policy("cpu")
    with pytest.raises(KeyboardInterrupt), torch.autocast("cpu"):
        net(torch.ones(1))
    assert active_policy("cpu") == before
