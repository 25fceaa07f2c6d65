"""Whatever changes a weight inside a region is seen by the next forward pass; no gradient of it is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tensorplay as tp
from tensorplay import nn

import mezzo.tensorplay
from mezzo.tensorplay.weight_casts import SMALLEST

from .defects import LOW, LOW_NAMES, Amp

MEZZO = Amp(mezzo.tensorplay)
low_dtypes = pytest.mark.parametrize("low", LOW, ids=LOW_NAMES)
# Casts of large weights are kept, small ones are cast again.
sizes = pytest.mark.parametrize("size", [16, SMALLEST], ids=["small", "large"])


def layer_of(size: int, value: float = 1.0) -> Any:
    layer = nn.Linear(16, size // 16, bias=False)
    with tp.no_grad():
        layer.weight.fill_(value)
    return layer


def answer(layer: Any) -> float:
    """Give the first output of a layer for ones: 16 times its weight, if all weights are alike."""
    return layer(tp.ones(1, 16))[0, 0].item()


def multiply(weight: Any) -> None:
    with tp.no_grad():
        weight.mul_(2)


def copy_into(weight: Any) -> None:
    with tp.no_grad():
        weight.copy_(tp.full(tuple(weight.shape), 2.0))


def write_detached(weight: Any) -> None:
    weight.detach().fill_(2)


def write_rows(weight: Any) -> None:
    with tp.no_grad():
        weight[:] = 2


def new_data(weight: Any) -> None:
    weight.data = tp.full(tuple(weight.shape), 2.0)


def multiply_all(weight: Any) -> None:
    with tp.no_grad():
        tp._foreach_mul_([weight], 2.0)


CHANGES = [multiply, copy_into, write_detached, write_rows, new_data, multiply_all]


@low_dtypes
@sizes
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_weight_is_seen(change: Callable[[Any], None], size: int, low: Any) -> None:
    layer = layer_of(size)
    with MEZZO.region(low):
        before = answer(layer)
        change(layer.weight)
        assert [before, answer(layer)] == [16, 32]


@sizes
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_state_that_is_loaded_is_seen(size: int, assign: bool) -> None:
    layer, other = layer_of(size), layer_of(size, 2.0)
    with MEZZO.region():
        before = answer(layer)
        layer.load_state_dict(other.state_dict(), assign=assign)
        assert [before, answer(layer)] == [16, 32]


KINDS: dict[str, dict[str, Any]] = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@sizes
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_step_of_an_optimizer_is_seen(name: str, kind: dict[str, Any], size: int) -> None:
    layer = layer_of(size)
    # The gradient of each weight is 1 and Adam's first steps are as large as the rate, so each step takes 1/2 off.
    options: dict[str, Any] = {"weight_decay": 0.0} if name == "AdamW" else {}
    stepper = getattr(tp.optim, name)(layer.parameters(), lr=0.5, **kind, **options)
    seen = []
    with MEZZO.region():
        for _ in range(3):
            stepper.zero_grad()
            result = layer(tp.ones(1, 16))
            seen.append(result[0, 0].item())
            result.sum().backward()
            stepper.step()
    assert seen == pytest.approx([16, 8, 0], abs=1e-3)


@sizes
def test_a_forward_without_gradients_first_costs_no_gradient(size: int) -> None:
    layer = layer_of(size)
    with MEZZO.region():
        with tp.no_grad():
            answer(layer)
        layer(tp.ones(1, 16)).sum().backward()
    assert layer.weight.grad.tolist() == tp.ones(size // 16, 16).tolist()


@sizes
def test_an_inference_forward_first_costs_no_gradient(size: int) -> None:
    layer = layer_of(size)
    with MEZZO.region():
        with tp.inference_mode():
            answer(layer)
        layer(tp.ones(1, 16)).sum().backward()
    assert layer.weight.grad.tolist() == tp.ones(size // 16, 16).tolist()


@sizes
def test_a_model_made_in_inference_mode_runs(size: int) -> None:
    with tp.inference_mode(), MEZZO.region():
        layer = layer_of(size)
        assert [answer(layer), answer(layer)] == [16, 16]


@sizes
def test_a_weight_frozen_in_a_region_has_no_gradient_and_unfrozen_has(size: int) -> None:
    layer, seen = layer_of(size), []
    with MEZZO.region():
        for needs in (True, False, True):
            layer.weight.requires_grad_(needs)
            seen.append(layer(tp.ones(1, 16)).requires_grad)
    assert seen == [True, False, True]


@sizes
def test_a_weight_has_a_cast_for_each_dtype(size: int) -> None:
    layer, seen = layer_of(size), []
    with MEZZO.region(tp.bfloat16):
        for low in (tp.bfloat16, tp.float16, tp.bfloat16):
            with MEZZO.region(low):
                seen.append(layer(tp.ones(1, 16)).dtype)
    assert seen == [tp.bfloat16, tp.float16, tp.bfloat16]


def test_new_weights_in_the_place_of_old_ones_are_seen() -> None:
    """A freed tensor's address and identity are given to the next one."""
    with MEZZO.region():
        assert [answer(layer_of(SMALLEST, float(value))) for value in range(8)] == [16.0 * value for value in range(8)]


@low_dtypes
def test_a_large_weight_used_thrice_sums_its_gradients_in_float32(low: Any) -> None:
    """Each use adds 1 + 2**-12, which bfloat16 and float16 cannot hold; three of the rounded ones would make 3."""
    layer = layer_of(SMALLEST)
    with MEZZO.region(low):
        results = [layer(tp.ones(1, 16) * scale) for scale in (1.0, 2.0**-12, 1.0)]
    sum(result.float().sum() for result in results).backward()
    assert layer.weight.grad.dtype == tp.float32
    assert layer.weight.grad[0, 0].item() == 2 + 2.0**-12


def test_retained_graphs_of_a_kept_cast_add_up() -> None:
    layer = layer_of(SMALLEST)
    with MEZZO.region():
        layer(tp.ones(1, 16))
        loss = layer(tp.ones(1, 16)).sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
    assert layer.weight.grad[0, 0].item() == 3


def test_a_kept_cast_is_differentiable_twice() -> None:
    layer, ones = layer_of(SMALLEST), tp.ones(1, 16).requires_grad_()
    with MEZZO.region():
        layer(ones)
        loss = tp.nn.functional.mse_loss(layer(ones), tp.zeros(1, SMALLEST // 16), reduction="sum") / SMALLEST
    (slope,) = tp.autograd.grad(loss, [ones], create_graph=True)
    slope.sum().backward()
    # d/dw of sum_i 2 sum_o (16 w) w / 131072: with all weights 1 each gets 2 (16 + 16) / 131072.
    assert layer.weight.grad[0, 0].item() == 64 / SMALLEST


def test_what_is_written_into_a_result_does_not_reach_the_kept_cast() -> None:
    """An op may give a view of its input, such as the kept cast."""
    layer = layer_of(SMALLEST)
    with MEZZO.region(), tp.no_grad():
        before = answer(layer)
        tp.einsum("ij->ij", layer.weight).mul_(2)
        assert [before, answer(layer)] == [16, 16]


def swap(weight: Any) -> None:
    other = tp.full(tuple(weight.shape), 2.0)
    weight.data, other.data = other.data, weight.data


def give_storage(weight: Any) -> None:
    with tp.no_grad():
        weight.set_(tp.full(tuple(weight.shape), 2.0))


def initialise(weight: Any) -> None:
    nn.init.constant_(weight, 2.0)


def set_from_vector(weight: Any) -> None:
    nn.utils.vector_to_parameters(tp.full((weight.numel(),), 2.0), [weight])


@sizes
@pytest.mark.parametrize("change", [swap, give_storage, initialise, set_from_vector])
def test_a_change_by_the_packages_own_helpers_is_seen(change: Callable[[Any], None], size: int) -> None:
    layer = layer_of(size)
    with MEZZO.region():
        before = answer(layer)
        change(layer.weight)
        assert [before, answer(layer)] == [16, 32]


@sizes
def test_a_copied_layer_has_casts_of_its_own(size: int) -> None:
    layer = layer_of(size)
    with MEZZO.region():
        before = answer(layer)
        twin = copy.deepcopy(layer)
        multiply(twin.weight)
        assert [before, answer(twin), answer(layer)] == [16, 32, 16]
