"""Dense and convolutional nets under autocast."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mezzo.jax import autocast

from .nets import LOW_DTYPES, Case, Draw, check, check_close, check_dots, cross_entropy, dots, relative_error, run, unit

pytestmark = pytest.mark.parametrize("dtype", LOW_DTYPES)
ACTIVATIONS = (jax.nn.relu, jax.nn.gelu, lambda h: jax.nn.gelu(h, approximate=False), jax.nn.silu, jnp.tanh, jax.nn.elu)


def mlp_outputs(params: Any, x: jax.Array) -> jax.Array:
    for activation, (weight, bias) in zip(ACTIVATIONS, params[:-1], strict=True):
        x = activation(x @ weight + bias)
    return x @ params[-1][0] + params[-1][1]


def mlp_loss(params: Any, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = mlp_outputs(params, x)
    return cross_entropy(logits, labels), logits


@cache
def mlp() -> Case:
    draw = Draw()
    params = [(draw(16, 16, scale=0.4), draw(16, scale=0.1)) for _ in range(len(ACTIVATIONS) + 1)]
    return Case(mlp_loss, params, draw(32, 16, scale=1.0), jnp.arange(32) % 16)


def test_an_mlp_agrees_with_float32(dtype: str) -> None:
    # Seven layers, each rounding its product and the sum with the bias.
    check(mlp(), dtype, value=6, gradient=14)


def test_an_mlp_called_outside_jit_agrees_with_float32(dtype: str) -> None:
    case = mlp()
    got = autocast(case.loss, dtype)(*case.args)
    check_close(got, case.expected[0], 6 * unit(dtype))
    # Float32 itself is off by a thousandth of this.
    assert relative_error(got[1], case.expected[0][1]) > 0.1 * unit(dtype)


def test_autocast_around_the_gradient_of_an_mlp_agrees_with_float32(dtype: str) -> None:
    case = mlp()
    (value, grads), jaxpr = run(autocast(jax.value_and_grad(case.loss, has_aux=True), dtype), *case.args)
    check_dots(jaxpr, dtype, total=case.dots)
    check_close(value, case.expected[0], 6 * unit(dtype))
    check_close(grads, case.expected[1], 14 * unit(dtype))


@pytest.mark.skipif(
    not hasattr(jax.config, "jax_allow_f16_reductions"), reason="needs JAX 0.9, which looks for such sums"
)
def test_no_sum_of_an_mlp_runs_low(dtype: str) -> None:
    """JAX itself refuses low sums while this option is off."""
    params, x, _ = mlp().args

    def loss(params: Any) -> jax.Array:
        # Not the cross-entropy: the derivative of its maximum counts in the low dtype, for a result which nothing reads.
        return jnp.mean(mlp_outputs(params, x) ** 2)

    before = jax.config.jax_allow_f16_reductions
    jax.config.update("jax_allow_f16_reductions", False)
    try:
        for step in (jax.grad(autocast(loss, dtype)), autocast(jax.grad(loss), dtype)):
            assert dots(jax.make_jaxpr(step)(params))[(dtype,) * 3] == 3 * len(params) - 1
        with pytest.raises(ValueError, match="jax_allow_f16_reductions"):
            jax.make_jaxpr(lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None))(jnp.ones(4, dtype))
    finally:
        jax.config.update("jax_allow_f16_reductions", before)


def batch_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    mean = x.mean((0, 1, 2))
    variance = (x * x).mean((0, 1, 2)) - mean * mean
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias, (mean, variance)


def conv(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def conv_loss(params: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    """Two convolutions with batch norms in training mode, a max pool and a dense layer; gives the statistics too."""
    h, first = batch_norm(conv(images, params["conv1"], 1), *params["norm1"])
    h = lax.reduce_window(jax.nn.relu(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h, second = batch_norm(conv(h, params["conv2"], 2), *params["norm2"])
    logits = jax.nn.relu(h).mean((1, 2)) @ params["dense"]
    return cross_entropy(logits, labels), (logits, first, second)


@cache
def conv_net() -> Case:
    draw = Draw()
    params = {
        "conv1": draw(3, 3, 3, 8),
        "norm1": (1 + draw(8, scale=0.1), draw(8, scale=0.1)),
        "conv2": draw(3, 3, 8, 8),
        "norm2": (1 + draw(8, scale=0.1), draw(8, scale=0.1)),
        "dense": draw(8, 4),
    }
    return Case(conv_loss, params, draw(8, 8, 8, 3, scale=1.0), jnp.arange(8) % 4)


def test_convolutions_with_batch_norms_in_training_agree_with_float32(dtype: str) -> None:
    check(conv_net(), dtype, value=4, gradient=8)


def test_the_statistics_of_a_batch_norm_are_computed_in_float32(dtype: str) -> None:
    case = conv_net()
    _, (logits, *statistics) = jax.eval_shape(autocast(case.loss, dtype, outputs="flow"), *case.args)
    assert logits.dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(statistics)} == {np.dtype("float32")}


FACTORS = {
    "a Python number": lambda: 8**-0.5,
    "np.sqrt": lambda: 1 / np.sqrt(8),
    "jnp.sqrt": lambda: 1 / jnp.sqrt(8),
    "rsqrt": lambda: lax.rsqrt(8.0),
    "power": lambda: jnp.power(8.0, -0.5),
}


@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_computed_from_numbers_alone_does_not_lift_an_activation(factor: str, dtype: str) -> None:
    """`q @ k.T / jnp.sqrt(d)`: nothing but a number, so the activation keeps its dtype, and its memory."""
    x = jnp.ones((4, 8))
    fn = autocast(lambda x: (x @ x.T) * FACTORS[factor](), dtype, outputs="flow")
    assert jax.eval_shape(fn, x).dtype == dtype
    check_close(fn(x).astype(jnp.float32), jnp.full((4, 4), 8**0.5), 2 * unit(dtype))
