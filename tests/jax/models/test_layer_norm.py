"""Layer norms of activations with a large mean, and a float32 cast that tracing leaves no trace of."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mezzo.jax import autocast, disabled, upcast

from .nets import LOW_DTYPES, Case, Draw, check, dots, relative_error, unit

MEAN = 30.0


def fast_variance(h: jax.Array) -> jax.Array:
    return jnp.mean(h * h, -1, keepdims=True) - jnp.mean(h, -1, keepdims=True) ** 2


def squared_variance(h: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(h), -1, keepdims=True) - jnp.square(jnp.mean(h, -1, keepdims=True))


def slow_variance(h: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(h - jnp.mean(h, -1, keepdims=True)), -1, keepdims=True)


VARIANCES = {
    "fast": fast_variance,
    "squared": squared_variance,
    "slow": slow_variance,
    "jnp.var": lambda h: jnp.var(h, -1, keepdims=True),
}


@cache
def normed() -> Case:
    """Layer norms with each way to a variance, of one activation; the outputs are named by the way."""

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        h = x @ params["w"] + params["b"]
        outputs = {}
        for name, variance in VARIANCES.items():
            scale, shift = params[name]
            normal = (h - jnp.mean(h, -1, keepdims=True)) * lax.rsqrt(variance(h) + 1e-6) * scale + shift
            outputs[name] = normal @ params["out"]
        return sum(jnp.mean((out - 1.0) ** 2) for out in outputs.values()), outputs

    draw = Draw()
    params = {"w": draw(32, 32), "b": MEAN + draw(32, scale=0.1), "out": draw(32, 32)}
    for name in VARIANCES:
        params[name] = (1 + draw(32, scale=0.1), draw(32, scale=0.1))
    return Case(loss, params, draw(64, 32, scale=1.0))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_layer_norms_of_activations_with_mean_30_agree_with_float32(dtype: str) -> None:
    # One rounding of a number near 30 is 30 units of what the norm keeps, the deviations from the mean; on average over
    # the roundings 30 / sqrt(3). A variance computed in the low dtype would be off by about 100 units.
    check(normed(), dtype, value=20, gradient=30)


def test_with_a_promoting_bias_layer_norms_keep_their_digits() -> None:
    check(normed(), "bfloat16", value=3, gradient=3, bias="promote")


def covariance(a: jax.Array, b: jax.Array) -> jax.Array:
    """What no table can save: the product of two activations looks like any other product."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)  # no equation: traced, both are float32 already
    return jnp.mean(a * b, -1) - jnp.mean(a, -1) * jnp.mean(b, -1)


def with_upcast(a: jax.Array, b: jax.Array) -> jax.Array:
    return covariance(upcast(a), upcast(b))


def with_disabled(a: jax.Array, b: jax.Array) -> jax.Array:
    with disabled():
        return covariance(a, b)


def activations(params: Any, x: jax.Array, shift: float) -> tuple[jax.Array, jax.Array]:
    return x @ params["a"] + shift, x @ params["b"] + shift


def covariances(inner: Any, dtype: str, shift: float) -> tuple[Any, Any]:
    """Give covariances of activations under autocast, and in float32 of the same activations."""
    draw = Draw()
    a = draw(32, 32)
    params = {"a": a, "b": a + draw(32, 32, scale=0.05)}
    x = draw(16, 32, scale=1.0)

    def net(params: Any, x: jax.Array) -> Any:
        one, two = activations(params, x, shift)
        return inner(one, two), (one, two)

    got, (one, two) = autocast(net, dtype, outputs="flow")(params, x)
    assert one.dtype == dtype
    assert dots(jax.make_jaxpr(autocast(net, dtype))(params, x)) == {(dtype,) * 3: 2}
    return got, covariance(jnp.asarray(one, jnp.float32), jnp.asarray(two, jnp.float32))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_a_cast_to_float32_is_lost_in_tracing_and_the_table_cannot_save_what_it_was_for(dtype: str) -> None:
    got, want = covariances(covariance, dtype, MEAN)
    # Each product near 900 is rounded, which is 900 units of a covariance near 1, over the root of 32 such products.
    assert relative_error(got, want) > 20 * unit(dtype)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("inner", [with_upcast, with_disabled])
def test_upcast_and_disabled_save_it(inner: Any, dtype: str) -> None:
    got, want = covariances(inner, dtype, MEAN)
    assert got.dtype == jnp.float32
    # All that float32 itself loses: 2**-24 * 900, relative to a covariance near 1.
    assert relative_error(got, want) < 1e-3


def test_upcast_and_disabled_save_products_beyond_the_range_of_float16() -> None:
    lost, _ = covariances(covariance, "float16", 300.0)
    assert not np.isfinite(lost).any()
    for inner in (with_upcast, with_disabled):
        got, want = covariances(inner, "float16", 300.0)
        assert relative_error(got, want) < 0.02  # float32: 2**-24 * 90000 each


@cache
def saved() -> Case:
    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        outputs = [inner(*activations(params, x, 3.0)) for inner in (with_upcast, with_disabled)]
        return sum(jnp.sum(out) for out in outputs), outputs

    draw = Draw()
    return Case(loss, {"a": draw(32, 32), "b": draw(32, 32)}, draw(16, 32, scale=1.0))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_gradients_go_through_upcast_and_disabled(dtype: str) -> None:
    check(saved(), dtype, value=5, gradient=4)
