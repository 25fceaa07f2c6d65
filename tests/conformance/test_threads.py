"""A region is its thread's, whatever the framework."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from .backend import OTHER_LOW, product_dtype, softmax_dtype

if TYPE_CHECKING:
    from collections.abc import Callable


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run each function in a thread of its own, at the same time; errors come back here."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(timeout=30) for future in [pool.submit(function) for function in functions]]


def test_a_new_thread_starts_outside_every_region(backend, low):
    with backend.region(low, policy="unified"):
        (found,) = in_threads(lambda: (product_dtype(backend), softmax_dtype(backend, low)))
        assert found == ("float32", low)
        assert (product_dtype(backend), softmax_dtype(backend, low)) == (low, "float32")


def test_a_thread_is_asked_about_its_own_regions(backend, low):
    def before_and_in_a_region() -> list[bool]:
        before = backend.is_enabled()
        with backend.region(low, enabled=False):
            return [before, backend.is_enabled()]

    with backend.region(low):
        assert in_threads(backend.is_enabled, before_and_in_a_region) == [False, [False, False]]
        assert backend.is_enabled()
    with backend.region(low, enabled=False):
        assert in_threads(backend.region(low)(backend.is_enabled)) == [True]
        assert not backend.is_enabled()


def test_a_new_thread_has_no_policy_of_another_thread_in_its_own_regions(backend, low):
    def product_in_a_region() -> str:
        with backend.region(low):
            return product_dtype(backend)

    with backend.region(low, policy="fp32"):
        assert product_dtype(backend) == "float32"
        assert in_threads(product_in_a_region) == [low]


def test_threads_with_different_dtypes_and_policies_do_not_see_each_other(backend, low):
    step = threading.Barrier(2, timeout=20)
    other = OTHER_LOW[low]

    def unified() -> list[Any]:
        seen = []
        with backend.region(low, policy="unified"):
            step.wait()  # both are inside
            seen.append((product_dtype(backend), softmax_dtype(backend, low)))
            step.wait()  # the other one nests a region
            seen.append((product_dtype(backend), softmax_dtype(backend, low)))
            step.wait()  # the other one has left its regions
            step.wait()
            seen.append((product_dtype(backend), softmax_dtype(backend, low)))
        return seen

    def full() -> list[Any]:
        seen = []
        with backend.region(other, policy="fp32"):
            step.wait()
            seen.append((product_dtype(backend), softmax_dtype(backend, other)))
            with backend.region(other, policy="unified"):
                step.wait()
                seen.append((product_dtype(backend), softmax_dtype(backend, other)))
            step.wait()
        seen.append((product_dtype(backend), softmax_dtype(backend, other)))
        step.wait()
        return seen

    first, second = in_threads(unified, full)
    assert first == [(low, "float32"), (low, "float32"), (low, "float32")]
    assert second == [("float32", "float32"), (other, "float32"), ("float32", other)]


def test_one_instance_may_be_open_in_two_threads_that_leave_in_the_order_they_came(backend, low):
    region = backend.region(low)
    step = threading.Barrier(2, timeout=20)

    def first() -> list[str]:
        with region:
            step.wait()
            step.wait()
            inside = product_dtype(backend)
        step.wait()
        return [inside, product_dtype(backend)]

    def second() -> list[str]:
        with backend.region(OTHER_LOW[low]):
            step.wait()
            with region:
                step.wait()
                step.wait()  # the first has left
                inside = product_dtype(backend)
            return [inside, product_dtype(backend)]

    assert in_threads(first, second) == [[low, "float32"], [low, OTHER_LOW[low]]]
