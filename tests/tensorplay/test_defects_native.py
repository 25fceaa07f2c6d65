"""Native autocast of TensorPlay 1.0 has each of the defects that docs/tensorplay.md lists.

If one of these tests fails with a later TensorPlay, that defect is gone: take it out of the list, and see whether mezzo
still has to mend it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import tensorplay as tp

from . import defect_states, defects
from .defect_calls import DIFFERENCES, LOW_RAISES, LOW_WRONG, MIXED_RAISES, MIXED_WRONG, RECURRENT, Call, error_of
from .defects import LOW, LOW_NAMES, NATIVE

low_dtypes = pytest.mark.parametrize("low", LOW, ids=LOW_NAMES)


@low_dtypes
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_1_a_net_with_layer_norm_diverges(low: Any, optimizer: str, cache: bool) -> None:
    losses = defects.layer_norm_losses(NATIVE, low, optimizer, cache=cache, steps=10)
    assert not max(losses) < 100 or any(math.isnan(loss) for loss in losses)


def test_2_accumulation_in_one_region_keeps_the_first_gradient_alone() -> None:
    assert defects.accumulated(NATIVE) == [17, 17, 17]
    assert defects.accumulated(NATIVE, cache_enabled=False) == [17, 34, 51]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
def test_2_the_second_of_two_losses_has_no_gradient(inside: bool) -> None:
    assert defects.two_losses(NATIVE, inside=inside) == [17, 17]


def test_2_a_second_autograd_grad_in_one_region_gives_none() -> None:
    assert defects.second_grad(NATIVE) == [True, False]


def test_2_a_step_after_a_skipped_one_finds_no_gradients() -> None:
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        defects.steps_after_a_skip(NATIVE)


def test_2_a_weight_unfrozen_in_a_region_has_no_gradient() -> None:
    assert defects.gradient_after_unfreezing(NATIVE) is None


@low_dtypes
def test_2_attention_with_a_mask_has_no_gradient(low: Any) -> None:
    gradients = defects.masked_encoder_gradients(NATIVE, low)
    assert [gradient is None for gradient in gradients[:4]] == [True, True, False, False]


def test_3_the_first_apply_decides_for_the_process() -> None:
    assert defects.first_apply(NATIVE, "parameter") == "[False, False, False]"
    assert defects.first_apply(NATIVE, "tensor") == "[True, True, True]"


@low_dtypes
def test_4_a_gradient_penalty_raises(low: Any) -> None:
    with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        defects.gradient_penalty(NATIVE, low)


def test_4_a_hessian_is_zero_without_a_word() -> None:
    assert set(defects.hessian(NATIVE, by_hand=False)) == {0.0}
    assert set(defects.hessian(NATIVE, by_hand=False, enabled=False)) == {0.0, 4.0}


def test_4_a_cast_loses_terms_of_a_second_gradient_without_a_word() -> None:
    assert defects.second_gradient_through_a_cast() == 32


def test_5_a_kept_cast_ignores_the_dtype() -> None:
    assert defect_states.dtype_of_a_kept_leaf(NATIVE) == [tp.bfloat16, tp.bfloat16]


@pytest.mark.parametrize("use", [defect_states.enter_twice, defect_states.recurse])
def test_5_an_instance_used_again_leaves_autocast_on(use: Callable[[Any], None]) -> None:
    assert defect_states.on_after(NATIVE, use)


def test_5_a_decorated_generator_runs_without_autocast() -> None:
    assert defect_states.dtype_in_a_generator(NATIVE) == tp.float32


def test_6_a_checkpoint_in_a_region_raises() -> None:
    with pytest.raises(RuntimeError, match="activation checkpoint replay mismatch"):
        defect_states.recomputed(NATIVE, decorated=False)


def test_7_cast_inputs_narrows_float64() -> None:
    assert defect_states.dtypes_with_cast_inputs(NATIVE, tp.bfloat16) == [tp.bfloat16, tp.bfloat16]


def test_8_a_region_inside_a_compiled_function_is_ignored() -> None:
    assert defect_states.dtypes_of_compiled(NATIVE) == {"inside": tp.float32, "around": tp.bfloat16}


@low_dtypes
@pytest.mark.parametrize("call", MIXED_RAISES.values(), ids=MIXED_RAISES)
def test_9_mixed_dtypes_raise(call: Call, low: Any) -> None:
    with NATIVE.region(low), pytest.raises((RuntimeError, TypeError), match=r"(?i)d-?type|scalar type|must be Float32"):
        call.run(call.mixed(low))


@low_dtypes
@pytest.mark.parametrize("call", MIXED_WRONG.values(), ids=MIXED_WRONG)
def test_9_mixed_dtypes_give_wrong_numbers(call: Call, low: Any) -> None:
    with NATIVE.region(low):
        assert not error_of(call, call.mixed(low)) < 0.25


@low_dtypes
@pytest.mark.parametrize("call", LOW_RAISES.values(), ids=LOW_RAISES)
def test_10_an_op_without_a_low_kernel_raises(call: Call, low: Any) -> None:
    with NATIVE.region(low), pytest.raises(NotImplementedError, match=r"not implemented|only supports"):
        call.run_and_back(call.low(low))


@low_dtypes
@pytest.mark.parametrize("call", LOW_WRONG.values(), ids=LOW_WRONG)
def test_10_a_low_kernel_gives_wrong_numbers(call: Call, low: Any) -> None:
    with NATIVE.region(low):
        assert not error_of(call, call.low(low)) < 0.25


@low_dtypes
@pytest.mark.parametrize("cell", RECURRENT.values(), ids=RECURRENT)
def test_10_a_recurrent_layer_refuses_a_low_input(cell: Any, low: Any) -> None:
    with NATIVE.region(low), pytest.raises(RuntimeError, match="different dtype or device"):
        cell(4, 4)(tp.randn(3, 2, 4).to(low))


@pytest.mark.parametrize("name", DIFFERENCES)
def test_11_some_dtypes_are_other_than_pytorchs(name: str) -> None:
    function, native, pytorchs = DIFFERENCES[name]
    with NATIVE.region():
        result = function(tp.rand(2, 3, 4).to(tp.bfloat16))
    assert str(result.dtype) == f"tensorplay.{native}"
    assert native != pytorchs
