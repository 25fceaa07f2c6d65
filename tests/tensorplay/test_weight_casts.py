"""Kept casts of large weights: used again, always fresh, of the right dtype, and never at the cost of a gradient."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import tensorplay as tp

import mezzo.tensorplay as mt
from mezzo.tensorplay.casting import cast
from mezzo.tensorplay.current import CURRENT
from mezzo.tensorplay.weight_casts import SMALLEST

SIDE = 384
assert SIDE * SIDE >= SMALLEST


def weight() -> object:
    tp.manual_seed(0)
    return tp.nn.Parameter(tp.randn(SIDE, SIDE))


def kept() -> int:
    return 0 if CURRENT.casts is None else len(CURRENT.casts)


X = tp.ones(2, SIDE)


def test_a_large_weight_is_cast_once_and_a_small_one_each_time() -> None:
    large, small = weight(), tp.nn.Parameter(tp.ones(4, 4))
    with mt.autocast("cpu"):
        X @ large
        assert kept() == 1
        X @ large
        tp.ones(2, 4) @ small
        assert kept() == 1
        X.bfloat16() @ tp.ones(SIDE, SIDE)  # no weight: neither a parameter nor a leaf that is trained
        assert kept() == 1
    with mt.autocast("cpu"):
        assert kept() == 0


@pytest.mark.parametrize("grad", [True, False])
def test_the_kept_cast_has_the_weights_numbers(grad: bool) -> None:
    large = weight()
    reference = X.bfloat16() @ large.detach().bfloat16()  # type: ignore[attr-defined]
    with tp.set_grad_enabled(grad), mt.autocast("cpu"):
        for _ in range(3):
            product = X @ large
            assert bool((product == reference).all())
            assert product.requires_grad is grad


def test_cache_enabled_false_keeps_nothing() -> None:
    large = weight()
    with mt.autocast("cpu", cache_enabled=False):
        X @ large
        assert CURRENT.casts is None
        with mt.autocast("cpu", cache_enabled=True):
            X @ large
            assert kept() == 1


def test_the_packages_clear_drops_the_kept_casts() -> None:
    large = weight()
    with mt.autocast("cpu"):
        X @ large
        tp.clear_autocast_cache()
        assert kept() == 0


def test_a_frozen_parameter_is_kept_too_and_has_no_gradient() -> None:
    large = weight()
    large.requires_grad_(False)  # type: ignore[attr-defined]
    with mt.autocast("cpu"):
        assert not (X @ large).requires_grad
        assert not (X @ large).requires_grad
        assert kept() == 1


def test_freezing_and_thawing_a_weight_inside_a_region_is_obeyed() -> None:
    large = weight()
    with mt.autocast("cpu"):
        X @ large
        large.requires_grad_(False)  # type: ignore[attr-defined]
        assert not (X @ large).requires_grad
        large.requires_grad_(True)  # type: ignore[attr-defined]
        (X @ large).sum().backward()
    assert float(large.grad[0, 0]) == 2.0  # type: ignore[attr-defined]


def without_grad(change: Callable[[object], object]) -> Callable[[object], object]:
    def run(large: object) -> None:
        with tp.no_grad():
            change(large)

    return run


CHANGES = {
    "in place": without_grad(lambda w: w.add_(1)),  # type: ignore[attr-defined]
    "an item": without_grad(lambda w: w.__setitem__(0, 5.0)),  # type: ignore[attr-defined]
    "a view": without_grad(lambda w: w[1:].mul_(2)),  # type: ignore[index]
    "copy_": without_grad(lambda w: w.copy_(tp.ones(SIDE, SIDE))),  # type: ignore[attr-defined]
    "data": lambda w: setattr(w, "data", tp.ones(SIDE, SIDE)),
    "data twice": lambda w: [setattr(w, "data", w.detach() * 2) for _ in range(2)],  # type: ignore[attr-defined]
    "data of another layout": lambda w: setattr(w, "data", w.detach().t()),  # type: ignore[attr-defined]
    "NumPy": lambda w: w.detach().numpy().fill(3.0),  # type: ignore[attr-defined]
    "DLPack": lambda w: tp.from_dlpack(w.detach()).fill_(3.0),  # type: ignore[attr-defined]
    "data of a row": lambda w: w[0].data.mul_(50.0),  # type: ignore[index]
    "NumPy of a part": lambda w: w.detach()[100:].numpy().fill(3.0),  # type: ignore[attr-defined]
    "through data": lambda w: w.data.mul_(3),  # type: ignore[attr-defined]
    "detached": lambda w: w.detach().fill_(3.0),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("grad", [True, False])
def test_a_weight_that_changed_is_cast_afresh(change: Callable[[object], object], grad: bool) -> None:
    large = weight()
    with tp.set_grad_enabled(grad), mt.autocast("cpu"):
        before = X @ large
        change(large)
        after = X @ large
    reference = X.bfloat16() @ large.detach().bfloat16()  # type: ignore[attr-defined]
    assert bool((after == reference).all())
    assert not bool((after == before).all())


def test_memory_that_was_given_away_stays_so_whatever_is_done_to_the_cache() -> None:
    first, second = weight(), weight()
    with mt.autocast("cpu"):
        with mt.autocast("cpu", cache_enabled=False):
            views = [first.data, second.data]  # type: ignore[attr-defined]
        tp.clear_autocast_cache()
        for large, view in zip((first, second), views, strict=True):
            X @ large
            view.fill_(3.0)
            assert bool((X @ large == 3.0 * SIDE).all())


def test_weights_can_be_swapped_inside_a_region() -> None:
    first, second = weight(), tp.nn.Parameter(tp.ones(SIDE, SIDE))
    with mt.autocast("cpu"):
        X @ first
        tp.utils.swap_tensors(first, second)
        assert bool((X @ first == SIDE).all())


def test_each_dtype_has_a_cast_of_its_own() -> None:
    large = weight()
    with mt.autocast("cpu", tp.bfloat16):
        assert str((X @ large).dtype) == "tensorplay.bfloat16"
        with mt.autocast("cpu", tp.float16):
            assert str((X @ large).dtype) == "tensorplay.float16"
        assert str((X @ large).dtype) == "tensorplay.bfloat16"
        assert kept() == 2


def test_a_weight_that_is_gone_is_not_kept_alive() -> None:
    large = weight()
    watched = weakref.ref(large)
    with mt.autocast("cpu"), tp.no_grad():
        X @ large
        assert kept() == 1
        del large
        gc.collect()
        assert watched() is None
        assert kept() == 0


# Gradients. Each use of a weight of ones adds 2 to each element of its gradient: X has two rows of ones.


def test_uses_before_and_after_a_backward_pass_all_count() -> None:
    large = weight()
    with mt.autocast("cpu"):
        first, second = (X @ large).sum(), (X @ large).sum()
        first.backward()
        third = (X @ large).sum()
        second.backward()
        third.backward()
    assert float(large.grad[3, 3]) == 6.0  # type: ignore[attr-defined]


def test_a_graph_that_is_kept_can_be_gone_through_again() -> None:
    large = weight()
    with mt.autocast("cpu"):
        loss = ((X @ large) + (X @ large)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert float(large.grad[3, 3]) == 8.0  # type: ignore[attr-defined]


def test_the_gradients_of_several_uses_are_summed_in_the_weights_own_dtype() -> None:
    """bfloat16, whose numbers have eight bits, holds 256 and 1 and not their sum."""
    large = weight()
    with mt.autocast("cpu"):
        loss = 128 * (X @ large).float().sum()
        for _ in range(3):
            loss = loss + 0.5 * (X @ large).float().sum()
        loss.backward()
    assert float(large.grad[3, 3]) == 259.0  # type: ignore[attr-defined]
    assert str(large.grad.dtype) == "tensorplay.float32"  # type: ignore[attr-defined]


def test_a_kept_cast_can_be_differentiated_twice() -> None:
    large = weight()
    with mt.autocast("cpu"):
        X @ large  # so that the next two are uses of what is kept
        (slope,) = tp.autograd.grad(((X @ large) * (X @ large)).float().sum(), large, create_graph=True)
        slope.sum().backward()
    by_hand = large.detach().requires_grad_()  # type: ignore[attr-defined]
    low = [cast(by_hand, tp.bfloat16) for _ in range(2)]
    product = (X.bfloat16() @ low[0]) * (X.bfloat16() @ low[1])
    (expected,) = tp.autograd.grad(product.float().sum(), by_hand, create_graph=True)
    expected.sum().backward()
    assert bool((slope == expected).all())
    assert bool((large.grad == by_hand.grad).all())  # type: ignore[attr-defined]
    assert float(large.grad.abs().max()) > 0  # type: ignore[attr-defined]


def test_a_use_under_no_grad_first_does_not_cost_a_later_one_its_gradient() -> None:
    large = weight()
    with mt.autocast("cpu"):
        with tp.no_grad():
            X @ large
        (X @ large).sum().backward()
    assert float(large.grad[0, 0]) == 2.0  # type: ignore[attr-defined]
