"""The bytes that are kept for the backward pass, with autocast and without."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax import Array, lax
from jax import numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from mezzo.jax import autocast
from mezzo.jax.explain import explain
from mezzo.jax.residuals import bytes_kept, compare
from mezzo.report import Residuals

W, X = jnp.ones((64, 64)), jnp.ones((32, 64))
WEIGHT, ACTIVATION = 64 * 64, 32 * 64


def residuals(fn: Any, *args: Any) -> Residuals:
    (region,) = explain(fn)(*args).regions
    assert region.residuals is not None
    return region.residuals


def product(w: Array, x: Array) -> Array:
    return jnp.sum(x @ w)


def test_a_product_keeps_its_operands_in_the_dtype_it_ran_in() -> None:
    assert residuals(autocast(product), W, X) == Residuals(4 * (WEIGHT + ACTIVATION), 2 * (WEIGHT + ACTIVATION))


@pytest.mark.parametrize("wrap", [jax.jit, jax.grad, lambda f: jax.jit(jax.value_and_grad(f))])
def test_it_is_known_of_regions_inside_of_a_step(wrap: Any) -> None:
    assert residuals(wrap(autocast(product)), W, X) == Residuals(4 * (WEIGHT + ACTIVATION), 2 * (WEIGHT + ACTIVATION))


def test_a_loop_keeps_what_it_needs_of_each_step() -> None:
    def deep(w: Array, x: Array) -> Array:
        return jnp.sum(lax.scan(lambda h, layer: (jnp.sin(h @ layer), None), x, w)[0])

    one, ten = (residuals(autocast(deep), jnp.ones((layers, 64, 64)), X) for layers in (1, 10))
    assert one.plain is not None
    assert one.autocast is not None
    assert one.autocast < one.plain
    assert (ten.plain, ten.autocast) == (10 * one.plain, 10 * one.autocast)


def test_remat_keeps_less() -> None:
    def deep(w: Array, x: Array) -> Array:
        return jnp.sum(jnp.sin(jnp.sin(x @ w) @ w))

    kept, again = residuals(autocast(deep), W, X), residuals(autocast(jax.checkpoint(deep)), W, X)
    assert again.autocast is not None
    assert kept.autocast is not None
    assert again.autocast == 4 * (WEIGHT + ACTIVATION)  # the arguments alone, which are float32
    assert kept.plain is not None
    assert kept.plain > 4 * (WEIGHT + ACTIVATION)


def test_it_equals_hand_written_code() -> None:
    def net(w: Array, x: Array) -> Array:
        return jnp.sum(jax.nn.relu(x @ w) @ w)

    def by_hand(w: Array, x: Array) -> list[Array]:
        low = jnp.bfloat16
        h = jax.nn.relu(x.astype(low) @ w.astype(low))
        return [jnp.sum((h @ w.astype(low)).astype(jnp.float32))]

    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (W, X)]
    assert residuals(autocast(net), W, X).autocast == bytes_kept(by_hand, shapes, [0, 1])


def test_integers_and_keys_are_not_differentiated_by() -> None:
    def noisy(key: Array, ids: Array, w: Array) -> Array:
        return jnp.sum(jnp.sin(w[ids]) * jax.random.normal(key, (3,)))

    found = residuals(autocast(noisy), jax.random.key(0), jnp.arange(3), jnp.ones(8))
    assert found.plain is not None
    assert found.plain >= 2 * 3 * 4


def test_constants_that_the_function_closes_over_are_not_differentiated_by() -> None:
    assert residuals(autocast(lambda x: jnp.sum(x @ W)), X) == Residuals(4 * WEIGHT, 2 * WEIGHT)


def test_what_has_no_float_argument_has_no_residuals() -> None:
    found = residuals(autocast(lambda ids: jnp.sum(W[ids] @ W)), jnp.arange(3))
    assert found == Residuals(None, None, "there is no float array among the arguments")
    assert str(found) == "not known: there is no float array among the arguments"


def test_what_cannot_be_differentiated_says_why() -> None:
    found = residuals(autocast(lambda x: jnp.sum(lax.while_loop(lambda h: h[0, 0] < 0, lambda h: h * 2, x))), X)
    assert (found.plain, found.autocast) == (None, None)
    assert found.reason.startswith("it cannot be differentiated (ValueError: Reverse-mode differentiation")


def test_a_region_around_the_gradient_has_its_backward_pass_inside() -> None:
    assert residuals(autocast(jax.grad(product)), W, X).reason == "a backward pass is inside of the region already"


def test_the_settings_of_the_region_are_those_that_are_compared() -> None:
    def biased(w: Array, x: Array) -> Array:
        return jnp.sum(jnp.tanh(x @ w + w[0]))

    adapt, promote = (residuals(autocast(biased, bias=bias), W, X).autocast for bias in ("adapt", "promote"))
    assert adapt is not None
    assert promote is not None
    assert promote > adapt


def test_an_array_that_is_kept_twice_counts_once() -> None:
    shape = jax.ShapeDtypeStruct((10,), jnp.float32)
    assert bytes_kept(lambda x: [x * x, x * x * x], [shape], [0]) <= 3 * 40
    assert bytes_kept(lambda x: [x + 1], [shape], [0]) == 0


def test_whatever_error_a_function_raises_is_the_reason() -> None:
    def wrong(x: Array) -> list[Array]:
        raise RuntimeError("not today\nnor tomorrow")

    found = compare(wrong, wrong, [jax.ShapeDtypeStruct((10,), jnp.float32)])
    assert found.reason == "it cannot be differentiated (RuntimeError: not today)"


def test_a_result_that_does_not_depend_on_anything_keeps_nothing() -> None:
    assert residuals(autocast(lambda x: 0), X) == Residuals(0, 0)


def test_a_region_inside_of_shards_says_why_it_is_not_known() -> None:
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("rows")), "out_specs": PartitionSpec()}

    def total(w: Array, x: Array) -> Array:
        return lax.psum(jnp.sum(x @ w), "rows")

    reason = "it uses the names of axes of a transformation around it, such as jax.shard_map"
    assert residuals(jax.shard_map(autocast(total), mesh=mesh, **specs), W, X) == Residuals(None, None, reason)
    assert residuals(autocast(jax.shard_map(total, mesh=mesh, **specs)), W, X).autocast is not None
