"""What a region means, whatever the framework: nesting, disabling, re-entry, decorating, exceptions, policies."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from .backend import OTHER_LOW, product_dtype, softmax_dtype


def test_outside_a_region_nothing_is_cast(backend):
    assert product_dtype(backend) == "float32"


def test_the_inner_region_wins_and_the_outer_one_is_back_when_it_ends(backend, low):
    with backend.region(low):
        assert product_dtype(backend) == low
        with backend.region(OTHER_LOW[low]):
            assert product_dtype(backend) == OTHER_LOW[low]
        assert product_dtype(backend) == low
    assert product_dtype(backend) == "float32"


def test_a_disabled_region_casts_nothing_and_ends_when_it_ends(backend, low):
    with backend.region(low):
        with backend.region(low, enabled=False):
            assert product_dtype(backend) == "float32"
            with backend.region(low):
                assert product_dtype(backend) == low
            assert product_dtype(backend) == "float32"
        assert product_dtype(backend) == low


def test_a_region_without_a_dtype_takes_the_one_around_it(backend, low):
    with backend.region(low), backend.region():
        assert product_dtype(backend) == low


def test_one_instance_may_be_entered_while_it_is_open(backend, low):
    region = backend.region(low)
    with region:
        with backend.region(OTHER_LOW[low]), region:
            assert product_dtype(backend) == low
        assert product_dtype(backend) == low
    assert product_dtype(backend) == "float32"


def test_one_instance_may_be_used_again_after_it_ended(backend, low):
    region = backend.region(low)
    for _ in range(2):
        with region:
            assert product_dtype(backend) == low
        assert product_dtype(backend) == "float32"


# Decorator


def test_a_decorated_function_runs_in_the_region_at_each_call(backend, low):
    decorated = backend.region(low)(lambda: product_dtype(backend))
    assert [decorated(), product_dtype(backend), decorated()] == [low, "float32", low]


def test_a_decorated_function_that_calls_itself_leaves_nothing_behind(backend, low):
    @backend.region(low)
    def descend(depth):
        below = [] if depth == 0 else descend(depth - 1)
        return [*below, product_dtype(backend)]

    assert descend(3) == [low] * 4
    assert product_dtype(backend) == "float32"


# Exceptions


def test_an_exception_goes_through_a_region_and_the_state_around_it_is_back(backend, low):
    error = KeyError("mine")
    with backend.region(low):
        with pytest.raises(KeyError) as caught, backend.region(OTHER_LOW[low], enabled=False, policy="fp32"):
            raise error
        assert caught.value is error
        assert product_dtype(backend) == low
    assert product_dtype(backend) == "float32"


def test_an_exception_goes_through_a_decorated_function_that_calls_itself(backend, low):
    @backend.region(low)
    def descend(depth):
        if depth == 0:
            raise KeyError(product_dtype(backend))
        descend(depth - 1)

    with pytest.raises(KeyError, match=low):
        descend(2)
    assert product_dtype(backend) == "float32"


# Asking


def test_one_can_ask_whether_a_region_is_open(backend, low):
    assert not backend.is_enabled()
    region = backend.region(low)
    with region:
        assert backend.is_enabled()
        with backend.region(low, enabled=False):
            assert not backend.is_enabled()
            with region:
                assert backend.is_enabled()
            assert not backend.is_enabled()
        assert backend.is_enabled()
    assert not backend.is_enabled()


def test_an_exception_closes_a_region_for_those_who_ask(backend, low):
    with backend.region(low):
        with pytest.raises(KeyError), backend.region(OTHER_LOW[low], enabled=False, policy="fp32"):
            raise KeyError
        assert backend.is_enabled()
    assert not backend.is_enabled()


@pytest.mark.parametrize("fails", [False, True])
def test_a_function_that_calls_itself_closes_its_regions(backend, low, fails):
    seen = []

    @backend.region(low)
    def descend(depth):
        seen.append(backend.is_enabled())
        if depth:
            descend(depth - 1)
        elif fails:
            raise KeyError

    with pytest.raises(KeyError) if fails else nullcontext():
        descend(2)
    assert seen == [True] * 3
    assert not backend.is_enabled()


# Policies


def test_the_inner_policy_wins_and_the_outer_one_is_back_when_it_ends(backend, low):
    with backend.region(low, policy="unified"):
        assert (product_dtype(backend), softmax_dtype(backend, low)) == (low, "float32")
        with backend.region(low, policy="fp32"):
            assert (product_dtype(backend), softmax_dtype(backend, low)) == ("float32", "float32")
        assert (product_dtype(backend), softmax_dtype(backend, low)) == (low, "float32")
    assert (product_dtype(backend), softmax_dtype(backend, low)) == ("float32", low)


def test_an_exception_brings_the_outer_policy_back(backend, low):
    with backend.region(low, policy="unified"):
        with pytest.raises(KeyError), backend.region(low, policy="fp32"):
            raise KeyError
        assert (product_dtype(backend), softmax_dtype(backend, low)) == (low, "float32")


def test_a_region_without_a_policy_keeps_the_one_around_it(backend, low):
    other = OTHER_LOW[low]
    with backend.region(low, policy="unified"), backend.region(other):
        assert (product_dtype(backend), softmax_dtype(backend, other)) == (other, "float32")


def test_a_region_without_a_policy_keeps_full_precision_around_it(backend, low):
    with backend.region(low, policy="fp32"), backend.region(OTHER_LOW[low]):
        assert product_dtype(backend) == "float32"


def test_a_policy_casts_nothing_in_a_disabled_region(backend, low):
    with backend.region(low, enabled=False, policy="unified"):
        assert (product_dtype(backend), softmax_dtype(backend, low)) == ("float32", low)
