"""``mezzo.tensorplay`` has none of the defects of native autocast that ``test_defects_native.py`` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorplay as tp
import tensorplay.nn.functional as F
from tensorplay import nn

import mezzo.tensorplay
from mezzo.tensorplay.weight_casts import SMALLEST

from . import defect_states, defects
from .defects import LOW, LOW_NAMES, Amp

MEZZO = Amp(mezzo.tensorplay)
low_dtypes = pytest.mark.parametrize("low", LOW, ids=LOW_NAMES)

# The relative error of a sum of products that were rounded to 8 or 11 bits, a few layers deep.
NEAR = {tp.bfloat16: 2**-5, tp.float16: 2**-8}


def assert_near(found: Any, exact: Any, low: Any) -> None:
    """Compare two tensors by the largest difference, over the largest value."""
    assert found.isfinite().all().item()
    error = (found.float() - exact.float()).abs().max().item()
    assert error <= NEAR[low] * exact.abs().max().item()


@low_dtypes
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_1_a_net_with_layer_norm_trains_as_in_float32(low: Any, optimizer: str, cache: bool) -> None:
    exact = defects.layer_norm_losses(MEZZO, None, optimizer)
    losses = defects.layer_norm_losses(MEZZO, low, optimizer, cache=cache)
    assert exact[-1] < 0.1 * exact[0]
    # The losses are of order one and their inputs are rounded; later the curves may part by a step or so.
    assert losses[:5] == pytest.approx(exact[:5], abs=3 * NEAR[low])
    assert losses[-1] == pytest.approx(exact[-1], abs=0.02)


@pytest.mark.parametrize("options", [{}, {"cache_enabled": False}], ids=["cache", "no cache"])
@low_dtypes
def test_2_accumulation_in_one_region_adds_up(low: Any, options: dict[str, Any]) -> None:
    assert defects.accumulated(MEZZO, low=low, **options) == [17, 34, 51]


def test_2_a_kept_cast_adds_up_too() -> None:
    assert defects.accumulated(MEZZO, SMALLEST) == [SMALLEST, 2 * SMALLEST, 3 * SMALLEST]
    for inside in (True, False):
        assert defects.two_losses(MEZZO, inside=inside, size=SMALLEST) == [SMALLEST, 2 * SMALLEST]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
def test_2_each_of_two_losses_has_its_gradient(inside: bool) -> None:
    assert defects.two_losses(MEZZO, inside=inside) == [17, 34]


def test_2_a_second_autograd_grad_in_one_region_answers() -> None:
    assert defects.second_grad(MEZZO) == [True, True]


def test_2_a_step_after_a_skipped_one_finds_its_gradients() -> None:
    assert defects.steps_after_a_skip(MEZZO) == [(2.0**15, True)] * 3


def test_2_a_weight_unfrozen_in_a_region_has_a_gradient() -> None:
    assert defects.gradient_after_unfreezing(MEZZO) == 17


@low_dtypes
def test_2_attention_with_a_mask_has_its_gradient(low: Any) -> None:
    exact = defects.masked_encoder_gradients(MEZZO, low, enabled=False)
    found = defects.masked_encoder_gradients(MEZZO, low)
    assert all(gradient is not None for gradient in found)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == tp.float32
        assert_near(one, other, low)


@low_dtypes
@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": tp.ones(3, 3, dtype=tp.bool)},
        {"attn_mask": tp.zeros(3, 3)},
        {"scale": 0.3},
        {"dropout_p": 1e-9},
        {},
    ],
    ids=["bool mask", "float mask", "scale", "dropout", "plain"],
)
def test_2_attention_has_its_gradient_whatever_its_options(low: Any, options: dict[str, Any]) -> None:
    def gradients(*, enabled: bool) -> list[Any]:
        tp.manual_seed(0)
        leaves = [tp.randn(2, 2, 3, 8).requires_grad_() for _ in range(3)]
        with MEZZO.region(low, enabled=enabled):
            inputs = [(leaf * 1).to(low) if enabled else leaf * 1 for leaf in leaves]
            result = F.scaled_dot_product_attention(*inputs, **options)
        result.float().pow(2).sum().backward()
        return [leaf.grad for leaf in leaves]

    for found, exact in zip(gradients(enabled=True), gradients(enabled=False), strict=True):
        assert_near(found, exact, low)


def test_3_the_first_apply_may_have_a_parameter() -> None:
    assert defects.first_apply(MEZZO, "parameter") == "[True, True, True]"


@low_dtypes
def test_4_a_gradient_penalty_is_float32s_within_rounding(low: Any) -> None:
    exact = defects.gradient_penalty(MEZZO, low, enabled=False)
    found = defects.gradient_penalty(MEZZO, low)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == tp.float32
        assert_near(one, other, low)


@pytest.mark.parametrize("by_hand", [False, True], ids=["as it is", "cast by hand"])
def test_4_a_hessian_is_float32s(by_hand: bool) -> None:
    exact = defects.hessian(MEZZO, by_hand=by_hand, enabled=False)
    assert set(exact) == {0.0, 4.0}
    assert defects.hessian(MEZZO, by_hand=by_hand) == exact


def test_5_a_kept_cast_knows_its_dtype() -> None:
    assert defect_states.dtype_of_a_kept_leaf(MEZZO) == [tp.bfloat16, tp.float16]


@pytest.mark.parametrize("use", [defect_states.enter_twice, defect_states.recurse])
def test_5_an_instance_used_again_leaves_autocast_off(use: Callable[[Any], None]) -> None:
    assert not defect_states.on_after(MEZZO, use)


def test_5_a_decorated_generator_runs_in_its_region() -> None:
    assert defect_states.dtype_in_a_generator(MEZZO) == tp.bfloat16


@low_dtypes
@pytest.mark.parametrize("size", [64, SMALLEST], ids=["small", "large"])
@pytest.mark.parametrize("decorated", [True, False], ids=["decorated", "in a region"])
def test_6_a_checkpoint_recomputes_what_was_computed(decorated: bool, size: int, low: Any) -> None:
    found = defect_states.recomputed(MEZZO, decorated=decorated, low=low, size=size)
    exact = defect_states.recomputed(MEZZO, decorated=decorated, low=low, size=size, kept=False)
    assert all(tp.equal(one, other) for one, other in zip(found, exact, strict=True))


def test_7_cast_inputs_leaves_float64_alone() -> None:
    assert defect_states.dtypes_with_cast_inputs(MEZZO, tp.bfloat16) == [tp.bfloat16, tp.float64]
    assert defect_states.dtypes_with_cast_inputs(MEZZO, tp.float32) == [tp.float32, tp.float64]


@low_dtypes
def test_two_backward_passes_through_a_retained_graph_add_up(low: Any) -> None:
    weight, ones = tp.ones(17, 1).requires_grad_(), tp.ones(1, 17)
    with MEZZO.region(low):
        loss = (ones @ weight).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert defects.sum_of_gradient(weight) == 34


@low_dtypes
def test_a_weight_that_two_layers_share_gets_both_gradients(low: Any) -> None:
    weight, ones = tp.ones(4, 4).requires_grad_(), tp.ones(1, 4)
    with MEZZO.region(low):
        (ones @ weight @ weight).sum().backward()
    assert weight.grad.tolist() == [[8.0] * 4] * 4  # 4 from each use


def test_a_critic_that_judges_twice_in_one_region_sums_both() -> None:
    critic, maker, noise = nn.Linear(4, 1, bias=False), nn.Linear(4, 4, bias=False), tp.ones(1, 4)
    with MEZZO.region():
        made = maker(noise)
        critic(made.detach()).sum().backward()
        once = critic.weight.grad.clone()
        critic(made).sum().backward()
    assert tp.equal(critic.weight.grad, 2 * once)
    assert maker.weight.grad is not None
