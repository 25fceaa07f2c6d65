"""Activation checkpointing under O1: what is run again in a backward pass without casts is cast as in the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import mezzo.torch
from mezzo.apex.amp import casts
from mezzo.apex.amp.registered import half_function
from mezzo.torch.repairs import Repaired
from mezzo.torch.switch import KEY

low_dtypes = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
variants = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Net(nn.Module):
    """Has ops that Apex's lists and PyTorch's list for the CPU rule differently: exp, softmax and gelu."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.part = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Softmax(-1), nn.Dropout(0.1), nn.Linear(16, 8))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.part, self.first(x)).exp()


def plain(part: nn.Module, x: Tensor) -> Tensor:
    return part(x)


def gradients(
    run: Callable[[nn.Module, Tensor], Tensor], low: torch.dtype, backward: Callable[[Tensor], None]
) -> tuple[list[Tensor], list[tuple[torch.dtype, ...]]]:
    """Run one step; return the gradients, and the dtypes of what each module of the part gave, each time it ran."""
    torch.manual_seed(0)
    net = Net(run)
    seen: list[tuple[torch.dtype, ...]] = []
    for module in net.part:
        module.register_forward_hook(lambda _module, args, output: seen.append((args[0].dtype, output.dtype)))
    casts.watch_model(net)
    casts.start(["cpu"], low, {})
    x = torch.rand(4, 8, requires_grad=True, generator=None)
    loss = net(x).square().mean()
    backward(loss)
    assert mezzo.torch.active_policy("cpu").name == "apex-o1"
    casts.forget_weight_casts()
    assert mezzo.torch.cache.casts_of_thread() == []
    casts.stop()
    return [x.grad, *(parameter.grad for parameter in net.parameters())], seen


def without_casts(loss: Tensor) -> None:
    with casts.without_casts():
        loss.backward()


def with_casts(loss: Tensor) -> None:
    loss.backward()


def disabled(loss: Tensor) -> None:
    with casts.disable_casts():
        loss.backward()


def in_a_thread_that_is_in(loss: Tensor) -> None:
    def backward() -> None:
        casts.ensure_here()
        without_casts(loss)
        casts.forget_weight_casts()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(backward).result()


@low_dtypes
@variants
@pytest.mark.parametrize("backward", [without_casts, with_casts, disabled, in_a_thread_that_is_in])
def test_what_runs_again_is_cast_as_in_the_forward_pass(
    low: torch.dtype, reentrant: bool, backward: Callable[[Tensor], None]
) -> None:
    expected, once = gradients(plain, low, with_casts if backward is with_casts else without_casts)

    def checkpointed(part: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(part, x, use_reentrant=reentrant)

    got, seen = gradients(checkpointed, low, backward)
    assert once[2] == (torch.float32, torch.float32)  # softmax, by Apex's list
    # All modules once more; that of the non-reentrant kind stops as soon as it has what it needs.
    assert seen[len(once) :] == once[: len(seen) - len(once)]
    assert len(seen) - len(once) in ((5,) if reentrant else (4, 5))
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@low_dtypes
def test_sequential_checkpointing(low: torch.dtype) -> None:
    expected, _ = gradients(plain, low, without_casts)
    got, _ = gradients(lambda part, x: checkpoint_sequential(part, 2, x, use_reentrant=False), low, without_casts)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@variants
def test_a_checkpointed_watched_model(reentrant: bool) -> None:
    found = []
    for run in (lambda net, x: net(x), lambda net, x: checkpoint(net, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        net = Net(plain)
        casts.watch_model(net)
        casts.start(["cpu"], torch.float16, {})
        x = torch.rand(4, 8, requires_grad=True)
        loss = run(net, x).square().mean()
        without_casts(loss)
        assert not torch.is_autocast_cache_enabled()
        found.append([x.grad, *(parameter.grad for parameter in net.parameters())])
        casts.stop()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@variants
def test_a_part_in_which_casts_are_disabled(reentrant: bool) -> None:
    seen: list[torch.dtype] = []

    @half_function
    def given(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x * x

    def run(part: nn.Module, x: Tensor) -> Tensor:
        def inside(x: Tensor) -> Tensor:
            with casts.disable_casts():
                return given(part(x))

        return checkpoint(inside, x.float(), use_reentrant=reentrant)

    gradients(run, torch.float16, without_casts)
    assert seen == [torch.float32, torch.float32]


def scattered(part: nn.Module, x: Tensor) -> Tensor:
    """A call of mixed dtypes, which needs a repair."""
    return torch.zeros(x.shape).scatter(0, torch.zeros(x.shape, dtype=torch.int64), part(x))


@variants
def test_a_part_that_needs_a_repair_gets_it_again(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Repaired, "ever", False)

    def run(part: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(scattered, part, x, use_reentrant=reentrant)

    found, _ = gradients(run, torch.bfloat16, without_casts)
    assert Repaired.ever
    wanted, _ = gradients(scattered, torch.bfloat16, without_casts)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_backward_passes_are_not_looked_at_while_no_call_was_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    included = torch._C._dispatch_tls_is_dispatch_key_included
    monkeypatch.setattr(Repaired, "ever", False)
    casts.start(["cpu"], torch.bfloat16, {})
    for repaired in (False, True):
        Repaired.ever = repaired
        with casts.without_casts():
            assert included(KEY) is repaired
            with casts.with_casts():
                assert included(KEY)
                assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is torch.bfloat16
            assert included(KEY) is repaired
        assert included(KEY)
