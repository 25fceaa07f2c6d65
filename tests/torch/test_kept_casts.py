"""How often the default policy casts weights for PyTorch's own kernels, inside one region.

The casts are counted by PyTorch's profiler (`tests.torch.counting`). `test_keep_casts.py` has what lives beyond a region.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.torch import autocast
from tests.torch.counting import LOW, counted_casts

low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)
OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
X = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))

GRAD_MODES = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
grad_modes = pytest.mark.parametrize("mode", GRAD_MODES.values(), ids=GRAD_MODES)


@dataclass
class Case:
    """A call with weights, each of a shape that nothing else in it has; `cast` of them are cast."""

    call: Callable[[], Tensor]
    weights: list[nn.Parameter]
    cast: int


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.rand(*shape) / 4)


def functional(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Case:
    weights = [parameter(*shape) for shape in shapes]
    return Case(lambda: function(*weights), weights, len(weights))


def module(net: nn.Module, *inputs: Tensor, cast: int) -> Case:
    def call() -> Tensor:
        result = net(*inputs)
        return result[0] if isinstance(result, tuple) else result

    return Case(call, list(net.parameters()), cast)


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


ROWS = torch.rand(3, 4, 16)
CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: functional(lambda w, b: F.linear(X, w, b), (5, 3), (5,)),
    "mm": lambda: functional(lambda w: torch.mm(X, w), (3, 5)),
    "addmm": lambda: functional(lambda b, w: torch.addmm(b, X, w), (5,), (3, 5)),
    "conv2d": lambda: functional(lambda w, b: F.conv2d(torch.ones(1, 3, 6, 6), w, b), (4, 3, 2, 2), (4,)),
    "bmm": lambda: functional(lambda w: torch.bmm(torch.ones(2, 7, 3), w), (2, 3, 5)),
    "attention": lambda: functional(F.scaled_dot_product_attention, (1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8)),
    "LSTM": lambda: module(nn.LSTM(6, 5), torch.rand(4, 2, 6), cast=4),
    "GRU": lambda: module(nn.GRU(6, 5), torch.rand(4, 2, 6), cast=4),
    "MultiheadAttention": lambda: module(nn.MultiheadAttention(16, 2, batch_first=True), ROWS, ROWS, ROWS, cast=4),
    # Its fast path in evaluation is one op. The weights of the two normalizations are not cast.
    "TransformerEncoderLayer": lambda: module(encoder_layer(), ROWS, cast=8),
    "TransformerEncoderLayer in evaluation": lambda: module(encoder_layer().eval(), ROWS, cast=8),
}
# PyTorch has no LSTM in float16 on a CPU to compare with.
PAIRS = [(name, low) for name in CASES for low in LOW if (name, low) != ("LSTM", torch.float16)]
cases = pytest.mark.parametrize(("name", "low"), PAIRS, ids=str)


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 5, bias=False)


def uncached(call: Callable[[], Tensor], low: torch.dtype) -> Tensor:
    """Compute what a call must give: PyTorch's own region, in which every use casts."""
    with torch.autocast("cpu", dtype=low, cache_enabled=False):
        return call()


# Counted in every grad mode


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@grad_modes
@cases
def test_weights_are_cast_once_however_often_they_are_used(
    name: str, low: torch.dtype, mode: Any, frozen: bool
) -> None:
    case = CASES[name]()
    for weight in case.weights:
        weight.requires_grad_(not frozen)
    for uses in (1, 3):
        with counted_casts(*case.weights) as casts, mode(), autocast("cpu", dtype=low):
            for _ in range(uses):
                result = case.call()
        assert casts.count == case.cast
    with mode():
        assert torch.equal(result.detach(), uncached(case.call, low).detach())


@cases
def test_a_forward_without_gradients_does_not_cost_a_later_one_its(name: str, low: torch.dtype) -> None:
    case = CASES[name]()
    with torch.autocast("cpu", dtype=low):
        wanted = torch.autograd.grad(case.call().float().sum(), case.weights)
    with autocast("cpu", dtype=low):
        with torch.inference_mode():
            quiet = case.call()
        with torch.no_grad():
            assert torch.equal(quiet, case.call())
            assert not quiet.requires_grad
        result = case.call()
    found = torch.autograd.grad(result.float().sum(), case.weights)
    # The same kernels on the same casts.
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert any(bool(gradient.any()) for gradient in found)


# Counted where the region says how long


@low_dtypes
def test_nested_regions_share_casts_and_the_outermost_one_drops_them(linear: nn.Linear, low: torch.dtype) -> None:
    with counted_casts(linear.weight) as casts:
        for _ in range(2):
            with autocast("cpu", dtype=low):
                linear(X)
                with autocast("cpu", dtype=low):
                    linear(X)
                    with autocast("cpu", enabled=False):
                        linear(X)
                linear(X)
    assert casts.count == 2


@grad_modes
@low_dtypes
def test_a_region_of_the_other_dtype_and_back(linear: nn.Linear, low: torch.dtype, mode: Any) -> None:
    results = []
    with counted_casts(linear.weight) as casts, mode(), autocast("cpu", dtype=low):
        results.append(linear(X))
        for _ in range(2):
            with autocast("cpu", dtype=OTHER[low]):
                results.append(linear(X))
            results.append(linear(X))
    assert casts.count == 2
    assert [result.dtype for result in results] == [low, OTHER[low], low, OTHER[low], low]
    with mode():
        for result in results:
            assert torch.equal(result.detach(), uncached(lambda: linear(X), result.dtype).detach())


@low_dtypes
def test_both_casts_of_a_weight_bring_gradients(linear: nn.Linear, low: torch.dtype) -> None:
    with autocast("cpu", dtype=low):
        outer = linear(X)
        with autocast("cpu", dtype=OTHER[low]):
            inner = linear(X)
    (outer.float().sum() + inner.float().sum()).backward()
    wanted = 2 * X.double().sum(0).expand(5, 3)
    # Of one rounding to 8 bits in each of two summands, and one of their sum.
    torch.testing.assert_close(linear.weight.grad.double(), wanted, rtol=2**-7, atol=0)


@low_dtypes
def test_with_the_cache_off_each_use_casts(linear: nn.Linear, low: torch.dtype) -> None:
    with counted_casts(linear.weight) as casts, autocast("cpu", dtype=low, cache_enabled=False):
        for _ in range(3):
            linear(X)
    assert casts.count == 3


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@low_dtypes
def test_clearing_pytorchs_cache_clears_mezzos(linear: nn.Linear, low: torch.dtype, frozen: bool) -> None:
    linear.requires_grad_(not frozen)
    with counted_casts(linear.weight) as casts, autocast("cpu", dtype=low):
        linear(X)
        torch.clear_autocast_cache()
        linear(X)
        linear(X)
    assert casts.count == 2


@low_dtypes
def test_clearing_the_cache_shows_a_write_that_leaves_no_trace(linear: nn.Linear, low: torch.dtype) -> None:
    with torch.no_grad(), autocast("cpu", dtype=low):
        before = linear(X)
        linear.weight.data.mul_(2)
        torch.clear_autocast_cache()
        # Twice a number has the same digits.
        assert torch.equal(linear(X), 2 * before)


@low_dtypes
def test_a_weight_that_is_frozen_after_use_and_thawed_again(linear: nn.Linear, low: torch.dtype) -> None:
    with autocast("cpu", dtype=low):
        first = linear(X)
        linear.requires_grad_(requires_grad=False)
        with counted_casts(linear.weight) as casts:
            second, again = linear(X), linear(X)
        linear.requires_grad_(requires_grad=True)
        third = linear(X)
    assert casts.count <= 1
    assert [result.requires_grad for result in (first, second, again, third)] == [True, False, False, True]
    assert torch.equal(first, second)
    third.float().sum().backward()
    wanted = X.double().sum(0).expand(5, 3)
    torch.testing.assert_close(linear.weight.grad.double(), wanted, rtol=2**-7, atol=0)


# Bounded


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("many_before", [False, True])
@low_dtypes
def test_short_lived_weights_in_a_long_region_are_let_go(low: torch.dtype, frozen: bool, many_before: bool) -> None:
    """However many weights were in use in an earlier region."""
    with autocast("cpu", dtype=low):
        for net in [nn.Linear(3, 5).requires_grad_(not frozen) for _ in range(200 * many_before)]:
            net(X)
    alive = []
    with autocast("cpu", dtype=low):
        for value in range(500):
            weight = nn.Parameter(torch.full((5, 3), float(value)), requires_grad=not frozen)
            assert F.linear(X, weight)[0, 0] == uncached(lambda weight=weight: F.linear(X, weight), low)[0, 0]
            alive.append(weakref.ref(weight))
            del weight
        gc.collect()
        assert sum(reference() is not None for reference in alive) <= 128
    gc.collect()
    assert sum(reference() is not None for reference in alive) == 0


@low_dtypes
def test_threads_cast_for_themselves(linear: nn.Linear, low: torch.dtype) -> None:
    """One thread leaves its region, which empties its casts, while the other is in the middle of its own."""
    step = threading.Barrier(2, timeout=20)
    linear.requires_grad_(requires_grad=False)

    def stays() -> int:
        with autocast("cpu", dtype=low):
            linear(X)
            step.wait()
            step.wait()
            with counted_casts(linear.weight) as casts:
                linear(X)
        return casts.count

    def leaves() -> None:
        step.wait()
        with autocast("cpu", dtype=low):
            linear(X)
        step.wait()

    with ThreadPoolExecutor(2) as pool:
        staying, leaving = pool.submit(stays), pool.submit(leaves)
        leaving.result(timeout=30)
        assert staying.result(timeout=30) == 0
