"""The casts of weights that mezzo's kernels keep: made once for the length of a region, and never left behind.

A cast is counted by the node it has in the autograd graph: two results that come from one cast share that node.
"""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import mezzo.torch
from mezzo.torch.cache import casts_of_thread

from .weights import LOW, OTHER, VECTOR, cast_behind, fresh, multiply, new_weight, one_cast, unified

low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)


@pytest.fixture
def weight() -> nn.Parameter:
    return new_weight()


# Made once


@low_dtypes
def test_two_uses_in_a_region_share_one_cast(weight, low):
    with unified(low):
        first, second = multiply(weight), multiply(weight)
    assert one_cast(first, second)
    assert torch.equal(first, fresh(weight, low))
    (first.sum() + second.sum()).backward()
    assert torch.equal(weight.grad, 2 * VECTOR.expand(4, 4))


@low_dtypes
def test_different_ops_share_the_cast_too(weight, low):
    with unified(low):
        first = multiply(weight)
        second = torch.addmv(torch.zeros(4), weight, VECTOR)
    assert cast_behind(first) in [parent for parent, _ in second.grad_fn.next_functions]


@low_dtypes
def test_backward_may_run_twice_through_one_cast(weight, low):
    with unified(low):
        first, second = multiply(weight), multiply(weight)
    first.sum().backward()
    second.sum().backward()
    assert torch.equal(weight.grad, 2 * VECTOR.expand(4, 4))


@low_dtypes
def test_nested_regions_share_casts_until_the_outermost_ends(weight, low):
    with unified(low):
        first = multiply(weight)
        with unified(low):
            second = multiply(weight)
        with mezzo.torch.autocast("cpu", enabled=False):
            pass
        third = multiply(weight)
    with unified(low):
        fourth = multiply(weight)
    assert one_cast(first, second)
    assert one_cast(first, third)
    assert not one_cast(first, fourth)


@low_dtypes
def test_the_observer_counts_the_casts_that_are_made(weight, low):
    with mezzo.torch.observe("cpu") as seen, unified(low):
        assert one_cast(multiply(weight), multiply(weight))
    assert [(call.op, call.casts) for call in seen.calls] == [("aten::mv", 2), ("aten::mv", 1)]


@low_dtypes
def test_what_is_no_float32_leaf_that_learns_is_cast_each_time(weight, low):
    frozen = weight.detach()
    with unified(low):
        for tensor in (weight * 1, weight.view(4, 4), nn.Parameter(weight.detach().to(OTHER[low]))):
            assert not one_cast(multiply(tensor), multiply(tensor))
        assert casts_of_thread() == []
        multiply(frozen)
        assert casts_of_thread() == []


@low_dtypes
def test_a_view_is_cast_each_time_even_if_it_is_a_leaf(low):
    view = new_weight().detach()[:, :].requires_grad_()
    assert view.is_leaf
    with unified(low):
        assert not one_cast(multiply(view), multiply(view))
        assert casts_of_thread() == []


@low_dtypes
def test_with_the_cache_switched_off_each_use_casts(weight, low):
    with unified(low, cache_enabled=False):
        assert not one_cast(multiply(weight), multiply(weight))
        with mezzo.torch.autocast("cpu", cache_enabled=True):
            assert one_cast(multiply(weight), multiply(weight))
        assert not one_cast(multiply(weight), multiply(weight))


@low_dtypes
def test_in_a_region_of_pytorchs_own_a_cast_lives_as_long_as_pytorchs_would(weight, low):
    mezzo.torch.set_default_policy("unified")
    try:
        with torch.autocast("cpu", dtype=low):
            first = multiply(weight)
            assert one_cast(first, multiply(weight))
            torch.clear_autocast_cache()
            assert casts_of_thread() == []
            second = multiply(weight)
            assert not one_cast(first, second)
        assert casts_of_thread() == []
        with torch.autocast("cpu", dtype=low):
            assert not one_cast(second, multiply(weight))
    finally:
        mezzo.torch.set_default_policy(None)


# Never left behind


@low_dtypes
@pytest.mark.parametrize("leave", ["by its end", "by an exception"])
def test_nothing_is_held_after_the_outermost_region(weight, low, leave):
    with pytest.raises(KeyError) if leave == "by an exception" else unified(low):
        with unified(low), unified(low):
            multiply(weight)
            kept = [weakref.ref(cast) for cast in casts_of_thread()]
            assert len(kept) == 1
            assert kept[0]() is not None
            if leave == "by an exception":
                raise KeyError
        if leave == "by its end":
            assert len(casts_of_thread()) == 1
    gc.collect()
    assert casts_of_thread() == []
    assert kept[0]() is None


@low_dtypes
def test_a_weight_dies_with_its_last_reference_after_the_region(low):
    weight = nn.Parameter(torch.ones(4, 4))
    alive = weakref.ref(weight)
    with unified(low):
        multiply(weight)
    del weight
    gc.collect()
    assert alive() is None


@low_dtypes
def test_threads_keep_casts_of_their_own_and_one_leaving_does_not_empty_the_others(weight, low):
    step = threading.Barrier(2, timeout=20)

    def stays() -> tuple[Tensor, Tensor]:
        with unified(low):
            first = multiply(weight)
            step.wait()
            step.wait()
            return first, multiply(weight)

    def leaves() -> Tensor:
        with unified(low):
            step.wait()
            product = multiply(weight)
        assert casts_of_thread() == []
        step.wait()
        return product

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(stays), pool.submit(leaves)]
        (first, again), other = (future.result(timeout=30) for future in futures)
    assert one_cast(first, again)
    assert not one_cast(first, other)
    assert torch.equal(first, other)
