"""`keep_casts`: how often weights are cast over several regions, when anew, and that nothing is held too long."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import autocast, keep_casts
from mezzo.torch.cache import casts_of_thread
from tests.torch.counting import LOW, counted_casts

low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)
kinds = pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
X = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 5, bias=False)


def use(net: nn.Module, low: torch.dtype, *, times: int = 1) -> Tensor:
    for _ in range(times):
        with autocast("cpu", dtype=low):
            result = net(X)
    return result


def expected(net: nn.Module, low: torch.dtype) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", dtype=low, cache_enabled=False):
        return net(X)


# How often


@kinds
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@low_dtypes
def test_ten_regions_cast_once(linear: nn.Linear, low: torch.dtype, mode: Any, frozen: bool) -> None:
    linear.requires_grad_(not frozen)
    with counted_casts(linear.weight) as with_block, mode(), keep_casts():
        kept = use(linear, low, times=10)
    with counted_casts(linear.weight) as without, mode():
        use(linear, low, times=10)
    assert (with_block.count, without.count) == (1, 10)
    assert torch.equal(kept.detach(), expected(linear, low))


@kinds
@low_dtypes
def test_ten_regions_cast_each_weight_of_a_net_once(low: torch.dtype, frozen: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 4)).requires_grad_(not frozen)
    with counted_casts(*net.parameters()) as casts, keep_casts():
        use(net, low, times=10)
    assert casts.count == 6


@low_dtypes
def test_no_grad_mode_casts_again_what_another_has_cast(linear: nn.Linear, low: torch.dtype) -> None:
    with counted_casts(linear.weight) as casts, keep_casts():
        with torch.inference_mode():
            use(linear, low)
        with torch.no_grad():
            use(linear, low)
        result = use(linear, low)
    # PyTorch may keep the one that has a graph, and mezzo the one that was made in inference mode.
    assert casts.count <= 2
    result.float().sum().backward()
    wanted = X.double().sum(0).expand(5, 3)
    torch.testing.assert_close(linear.weight.grad.double(), wanted, rtol=2**-7, atol=0)


@low_dtypes
def test_the_end_of_the_block_drops_all(linear: nn.Linear, low: torch.dtype) -> None:
    frozen = nn.Linear(3, 5, bias=False).requires_grad_(requires_grad=False)
    with keep_casts():
        use(linear, low)
        use(frozen, low)
        kept = [weakref.ref(cast) for cast in casts_of_thread()]
        assert kept
    gc.collect()
    assert casts_of_thread() == []
    assert [reference() for reference in kept] == [None] * len(kept)
    with counted_casts(linear.weight) as casts:
        use(linear, low)
        use(frozen, low)
    assert casts.count == 2


def test_an_exception_drops_all_too(linear: nn.Linear) -> None:
    with pytest.raises(KeyError), keep_casts():
        use(linear, torch.bfloat16)
        raise KeyError
    with counted_casts(linear.weight) as casts:
        use(linear, torch.bfloat16)
    assert casts.count == 1


@low_dtypes
def test_the_inner_of_two_blocks_drops_nothing(linear: nn.Linear, low: torch.dtype) -> None:
    with counted_casts(linear.weight) as casts, keep_casts():
        use(linear, low)
        with keep_casts():
            use(linear, low)
        use(linear, low)
    assert casts.count == 1


@low_dtypes
def test_a_decorator_keeps_for_the_length_of_each_call(linear: nn.Linear, low: torch.dtype) -> None:
    @keep_casts()
    def infer(batches: int) -> Tensor:
        return use(linear, low, times=batches)

    with counted_casts(linear.weight) as casts:
        infer(3)
        infer(3)
    assert casts.count == 2
    assert infer.__name__ == "infer"


@low_dtypes
def test_a_block_inside_of_a_region(linear: nn.Linear, low: torch.dtype) -> None:
    with counted_casts(linear.weight) as casts, autocast("cpu", dtype=low):
        linear(X)
        with keep_casts():
            use(linear, low, times=5)
        linear(X)
    # One before the block, one in it and one after it, if they are kept in different places.
    assert casts.count <= 3
    assert casts_of_thread() == []


# When anew


def stepped(optimizer: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Linear], None]:
    def change(net: nn.Linear) -> None:
        net.weight.grad = torch.ones_like(net.weight)
        optimizer(net.parameters(), lr=0.5, **options).step()

    return change


@torch.no_grad()
def copied(net: nn.Linear) -> None:
    net.weight.copy_(net.weight + 1)


def given_data(net: nn.Linear) -> None:
    net.weight.data = net.weight.detach() + 1


def loaded(net: nn.Linear) -> None:
    net.load_state_dict({"weight": net.weight.detach() + 1})


def cleared(net: nn.Linear) -> None:
    net.weight.data.add_(1)  # leaves no trace
    torch.clear_autocast_cache()


CHANGES: dict[str, Callable[[nn.Linear], None]] = {
    "SGD": stepped(torch.optim.SGD),
    "Adam foreach": stepped(torch.optim.Adam, foreach=True),
    "Adam fused": stepped(torch.optim.Adam, fused=True),
    "copy_": copied,
    "data": given_data,
    "load_state_dict": loaded,
    "clear_autocast_cache": cleared,
}


# An optimizer takes no step for a frozen weight.
CHANGED = [(name, frozen) for name in CHANGES for frozen in (False, True) if not frozen or name[0].islower()]


@pytest.mark.parametrize(("change", "frozen"), CHANGED)
@low_dtypes
def test_a_changed_weight_is_cast_anew_and_once(linear: nn.Linear, low: torch.dtype, change: str, frozen: bool) -> None:
    linear.requires_grad_(not frozen)
    with counted_casts(linear.weight) as casts, keep_casts():
        before = use(linear, low, times=2)
        CHANGES[change](linear)
        after = use(linear, low, times=2)
    assert not torch.equal(before, after)
    assert torch.equal(after.detach(), expected(linear, low))
    assert casts.count == 2


def test_a_step_of_one_optimizer_drops_the_casts_of_weights_that_it_does_not_have(linear: nn.Linear) -> None:
    """A fused step leaves no trace on a weight, so nobody can tell which it has changed."""
    other = nn.Linear(3, 5)
    with counted_casts(linear.weight) as casts, keep_casts():
        use(linear, torch.bfloat16, times=2)
        stepped(torch.optim.SGD)(other)
        use(linear, torch.bfloat16, times=2)
    assert casts.count == 2


UNWATCHED: dict[str, Callable[[torch.dtype], Any]] = {
    "plain": lambda low: torch.autocast("cpu", dtype=low),
    "policy torch": lambda low: autocast("cpu", dtype=low, policy="torch"),
}
EARLIER: dict[str, Callable[[], None]] = {
    "not emptied": lambda: None,
    "emptied by a step": lambda: stepped(torch.optim.SGD)(nn.Linear(3, 5)),
    "emptied by hand": lambda: (torch.clear_autocast_cache(), None)[1],  # looked up late: mezzo wraps it
}


@pytest.mark.parametrize("uses", [0, 1])
@pytest.mark.parametrize("empty", EARLIER.values(), ids=EARLIER)
@pytest.mark.parametrize("unwatched", UNWATCHED.values(), ids=UNWATCHED)
@low_dtypes
def test_casts_of_a_region_that_is_not_watched_are_not_used(
    linear: nn.Linear, low: torch.dtype, unwatched: Callable[[torch.dtype], Any], empty: Callable[[], None], uses: int
) -> None:
    """A plain region keeps its casts in the block and does not look at the weights; mezzo's region does."""
    with keep_casts():
        for _ in range(uses):
            use(linear, low)
        empty()
        with unwatched(low):
            before = linear(X)
        copied(linear)
        assert torch.equal(use(linear, low).detach(), expected(linear, low))
    assert not torch.equal(before, expected(linear, low))


@low_dtypes
def test_casts_of_an_inner_region_that_is_not_watched_are_not_used(linear: nn.Linear, low: torch.dtype) -> None:
    with autocast("cpu", dtype=low):
        with UNWATCHED["policy torch"](low):
            before = linear(X)
        copied(linear)
        assert torch.equal(linear(X).detach(), expected(linear, low))
    assert not torch.equal(before, expected(linear, low))


# Gradients


def accumulated(net: nn.Module, low: torch.dtype, batches: Tensor, *, at_once: bool) -> Tensor:
    net.zero_grad()
    losses = []
    for batch in batches:
        with autocast("cpu", dtype=low):
            losses.append(net(batch).float().square().mean())
        if not at_once:
            losses[-1].backward()
    if at_once:
        torch.stack(losses).sum().backward()
    return net.weight.grad.clone()


@low_dtypes
def test_gradients_accumulated_over_regions_are_those_without_the_block(linear: nn.Linear, low: torch.dtype) -> None:
    batches = torch.rand(4, 2, 3)
    with counted_casts(linear.weight) as without:
        wanted = accumulated(linear, low, batches, at_once=False)
    with counted_casts(linear.weight) as with_block, keep_casts():
        found = accumulated(linear, low, batches, at_once=False)
    # The gradient of each batch is cast back.
    assert (with_block.count, without.count) == (1 + 4, 4 + 4)
    # Each backward pass goes through the cast alone, so sums are in float32 either way.
    assert torch.equal(found, wanted)


@low_dtypes
def test_gradients_of_one_backward_pass_over_regions_are_close(linear: nn.Linear, low: torch.dtype) -> None:
    batches = torch.rand(4, 2, 3)
    wanted = accumulated(linear, low, batches, at_once=True)
    with keep_casts():
        found = accumulated(linear, low, batches, at_once=True)
    # The four gradients meet at the one cast, and are summed in its dtype: three more roundings.
    scale = wanted.abs().max()
    torch.testing.assert_close(found / scale, wanted / scale, rtol=0, atol=3 * torch.finfo(low).eps)
    assert found.dtype is torch.float32


def test_training_in_a_block_is_training_without_it() -> None:
    def train() -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
        for batch in torch.rand(8, 2, 3):
            with autocast("cpu"):
                loss = net(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in net.parameters()]

    wanted = train()
    with keep_casts():
        found = train()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# Not held too long


@kinds
@low_dtypes
def test_short_lived_weights_are_let_go_in_the_block(low: torch.dtype, frozen: bool) -> None:
    alive = []
    with keep_casts():
        for _ in range(500):
            net = nn.Linear(3, 5, bias=False).requires_grad_(not frozen)
            use(net, low)
            alive.append(weakref.ref(net.weight))
            del net
        gc.collect()
        assert sum(reference() is not None for reference in alive) <= 128
    gc.collect()
    assert sum(reference() is not None for reference in alive) == 0


@kinds
def test_a_deleted_model_is_freed_when_others_are_used(frozen: bool) -> None:
    def model(layers: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))).requires_grad_(not frozen)

    with keep_casts():
        first = model(10)
        use(first, torch.bfloat16)
        alive = [weakref.ref(parameter) for parameter in first.parameters()]
        del first
        # As many weights again, and at least the number below which nothing is swept.
        second = model(64)
        use(second, torch.bfloat16, times=2)
        gc.collect()
        assert [reference() for reference in alive] == [None] * 20
        with counted_casts(second[0].weight) as casts:
            use(second, torch.bfloat16)
    assert casts.count == 0


@low_dtypes
def test_what_is_known_of_a_weight_does_not_keep_it_alive(low: torch.dtype) -> None:
    net = nn.Linear(3, 5, bias=False)
    alive = weakref.ref(net.weight)
    use(net, low)
    with keep_casts():
        use(net, low)
    del net
    gc.collect()
    assert alive() is None


# Threads


@kinds
def test_a_block_is_for_its_thread(linear: nn.Linear, frozen: bool) -> None:
    """While one thread is in a block, regions of another cast for themselves and do not lengthen its life."""
    linear.requires_grad_(not frozen)
    step = threading.Barrier(2, timeout=20)

    def keeps() -> Tensor:
        with keep_casts():
            use(linear, torch.bfloat16)
            step.wait()
            step.wait()
            return use(linear, torch.bfloat16, times=2).detach()

    def does_not() -> list[Tensor]:
        step.wait()
        use(linear, torch.bfloat16, times=2)
        left = casts_of_thread()
        step.wait()
        return left

    with ThreadPoolExecutor(2) as pool:
        keeping, other = pool.submit(keeps), pool.submit(does_not)
        assert other.result(timeout=30) == []
        assert torch.equal(keeping.result(timeout=30), expected(linear, torch.bfloat16))


def test_a_change_made_by_another_thread_is_seen(linear: nn.Linear) -> None:
    with keep_casts(), ThreadPoolExecutor(1) as pool:
        before = use(linear, torch.bfloat16)
        pool.submit(copied, linear).result(timeout=30)
        after = use(linear, torch.bfloat16)
        pool.submit(CHANGES["Adam fused"], linear).result(timeout=30)
        last = use(linear, torch.bfloat16)
    assert not torch.equal(before, after)
    assert not torch.equal(after, last)
    assert torch.equal(last.detach(), expected(linear, torch.bfloat16))
