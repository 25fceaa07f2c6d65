"""The casts of weights under O1 are never stale, are shared within a ``forward``, and do not pile up."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo.torch
from mezzo.apex.amp import casts

low_dtypes = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)


def start(low: torch.dtype = torch.float16) -> casts.Handle:
    return casts.start(["cpu"], low, {})


def ema_swap(weight: nn.Parameter) -> None:
    weight.data.copy_(torch.full_like(weight, 3.0))


def load(weight: nn.Parameter) -> None:
    nn.ParameterList([weight]).load_state_dict({"0": torch.full_like(weight, 3.0)})


def swap_storage(weight: nn.Parameter) -> None:
    weight.data = torch.full_like(weight, 3.0)


def step(weight: nn.Parameter) -> None:
    weight.grad = torch.full_like(weight, -2.0)
    torch.optim.SGD([weight], lr=1.0, fused=True).step()


CHANGES = {"p.data.copy_": ema_swap, "load_state_dict": load, "p.data =": swap_storage, "fused step": step}


@low_dtypes
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "learning"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_weight_changed_between_two_evaluations_is_cast_anew(
    low: torch.dtype, watched: bool, frozen: bool, change: Callable[[nn.Parameter], None]
) -> None:
    net = nn.Linear(4, 4, bias=False).requires_grad_(not frozen)
    net.weight.data.fill_(1.0)
    if watched:
        casts.watch_model(net)
    start(low)
    with torch.no_grad():
        first = net(torch.ones(1, 4))
    change(net.weight)
    with torch.no_grad():
        second = net(torch.ones(1, 4))
    assert (first[0, 0].item(), second[0, 0].item()) == (4.0, 12.0)


@low_dtypes
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])
def test_training_after_an_evaluation_gets_gradients(low: torch.dtype, watched: bool) -> None:
    net = nn.Linear(4, 4)
    if watched:
        casts.watch_model(net)
    start(low)
    with torch.no_grad():
        net(torch.ones(1, 4))
    net(torch.ones(1, 4)).sum().backward()
    assert torch.equal(net.weight.grad, torch.ones(4, 4))


class Twice(nn.Module):
    """Uses one weight twice, once of the times without gradients if asked."""

    def __init__(self, look_first: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.look_first = look_first

    def forward(self, x: Tensor) -> Tensor:
        if self.look_first:
            with torch.no_grad():
                self.inner(x)
        return self.inner(self.inner(x))


@low_dtypes
@pytest.mark.parametrize("look_first", [True, False])
def test_a_weight_used_twice_gets_gradients_from_both_uses(low: torch.dtype, look_first: bool) -> None:
    """Apex raised IndexError here, from PyTorch 1.10 on."""
    net = Twice(look_first)
    casts.watch_model(net)
    net.inner.weight.data.fill_(0.5)
    start(low)
    net(torch.ones(1, 4)).sum().backward()
    # d/dw of sum(W W x) is 2 x + W^T 1 x^T: 2 from the second use, 2 from the first.
    assert torch.equal(net.inner.weight.grad, torch.full((4, 4), 4.0))


def casts_made(net: nn.Module) -> int:
    with torch.profiler.profile() as seen:
        net(torch.ones(1, 4, dtype=torch.float16))
    return sum(event.count for event in seen.key_averages() if event.key == "aten::_to_copy")


@pytest.mark.parametrize("caching", [True, False])
def test_a_weight_is_cast_once_in_a_forward_of_a_watched_model(caching: bool) -> None:
    net = Twice()
    casts.start(["cpu"], torch.float16, {}, enable_caching=caching)
    assert casts_made(net) == 2
    casts.watch_model(net)
    assert casts_made(net) == (1 if caching else 2)


def test_no_casts_are_held_between_two_calls() -> None:
    net = Twice()
    casts.watch_model(net)
    start()
    for _ in range(3):
        net(torch.ones(1, 4)).sum().backward()
        with torch.inference_mode():
            net(torch.ones(1, 4))
        assert mezzo.torch.cache.casts_of_thread() == []
    weight = weakref.ref(net.inner.weight)
    del net
    gc.collect()
    assert weight() is None


def test_keep_casts_keeps_them_from_one_call_to_the_next() -> None:
    net = Twice()
    casts.watch_model(net)
    start()
    with torch.inference_mode(), mezzo.torch.keep_casts():
        assert casts_made(net) == 1
        assert casts_made(net) == 0
    casts.forget_weight_casts()
    assert mezzo.torch.cache.casts_of_thread() == []


def test_weight_casts_can_be_forgotten_within_a_forward() -> None:
    net = Twice()
    seen = []

    def after_the_first_use(*_: object) -> None:
        casts.forget_weight_casts()
        seen.append(len(mezzo.torch.cache.casts_of_thread()))

    net.inner.register_forward_hook(after_the_first_use)
    casts.watch_model(net)
    start()
    assert casts_made(net) == 2
    assert seen == [0, 0]


# Watched models


def test_watching_twice_is_watching_once() -> None:
    net = nn.Linear(2, 2)
    for _ in range(2):
        casts.watch_model(net)
    assert (len(net._forward_pre_hooks), len(net._forward_hooks)) == (1, 1)


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_a_watched_model_can_be_copied(carry: Callable[[nn.Module], nn.Module]) -> None:
    net = Twice()
    casts.watch_model(net)
    twin = carry(net)
    casts.watch_model(twin)
    start()
    assert len(twin._forward_pre_hooks) == 1
    assert twin(torch.ones(1, 4)).dtype is torch.float16
    assert casts_made(twin) == 1


class Raising(nn.Module):
    def __init__(self, error: type[BaseException] | None) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_does_not_keep_casts_alive(error: type[BaseException]) -> None:
    net, other = Raising(error), nn.Linear(2, 2)
    casts.watch_model(net)
    casts.watch_model(other)
    start()
    with pytest.raises(error):
        net(torch.ones(1))
    casts.ensure_here()
    assert not torch.is_autocast_cache_enabled()
    other(torch.ones(1, 2))
    assert not torch.is_autocast_cache_enabled()


def test_a_watched_model_may_be_in_another() -> None:
    inner = Twice()
    outer = nn.Sequential(inner, inner)
    casts.watch_model(inner)
    casts.watch_model(outer)
    start()
    assert casts_made(outer) == 1
    assert not torch.is_autocast_cache_enabled()
