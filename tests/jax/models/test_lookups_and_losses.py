"""Embeddings, cross-entropies of large logits, and rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mezzo.jax import autocast, disabled

from .nets import LOW_DTYPES, Case, Draw, check, check_close, check_dots, dots, relative_error, run, unit

pytestmark = pytest.mark.parametrize("dtype", LOW_DTYPES)


@cache
def language_model() -> Case:
    """Tokens looked up by index and by one-hot rows, and logits from the same table."""

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = params["table"][ids] + jax.nn.one_hot(ids[::-1], 16) @ params["table"]
        logits = jnp.tanh(h @ params["w"]) @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    draw = Draw()
    return Case(loss, {"table": draw(16, 8, scale=1.0), "w": draw(8, 8)}, jnp.arange(48) % 16, jnp.arange(48) % 5)


def test_embeddings_by_index_and_by_one_hot_agree_with_float32(dtype: str) -> None:
    check(language_model(), dtype, value=3, gradient=4)


LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "integer labels": optax.softmax_cross_entropy_with_integer_labels,
    "one-hot labels": lambda logits, labels: optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 16)),
    "logsumexp": lambda logits, labels: jax.nn.logsumexp(logits, -1) - logits[jnp.arange(len(labels)), labels],
    "sigmoid": lambda logits, labels: optax.sigmoid_binary_cross_entropy(logits, jax.nn.one_hot(labels, 16)).mean(-1),
}


def test_a_cross_entropy_of_large_logits_is_that_of_float32(dtype: str) -> None:
    """Logits of whole multiples of 64 up to 16,384 are exact in both dtypes, so all the rest must be: it is float32."""
    labels = jnp.arange(32) % 16
    random = np.random.default_rng(0)
    # One input of a row is 1, the others are 0: each logit is an entry of the weights, some of them equal.
    weights = jnp.asarray(random.integers(-4, 5, (16, 16)) * 64.0, jnp.float32).at[:8].multiply(64)
    x = jax.nn.one_hot(random.integers(0, 16, 32), 16)

    def loss(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        losses = {name: fn(x @ weights, labels) for name, fn in LOSSES.items()}
        return sum(one.mean() for one in losses.values()), losses

    want, _ = run(jax.value_and_grad(loss, has_aux=True), weights, x)
    got, jaxpr = run(jax.value_and_grad(autocast(loss, dtype), has_aux=True), weights, x)
    check_dots(jaxpr, dtype, total=2 * len(LOSSES))
    check_close(got[0], want[0], 1e-6)
    # The gradient of the logits is rounded to the low dtype once for each of the losses.
    check_close(got[1], want[1], 2 * unit(dtype))
    assert float(jnp.abs(weights).max()) == 16_384.0


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    one, two = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    return jnp.concatenate([one * cos - two * sin, one * sin + two * cos], axis=-1)


def frequencies(size: int) -> jax.Array:
    return 10_000.0 ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)


ANGLES: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "positions as integers": lambda positions, size: positions[:, None] * frequencies(size),
    "positions as float32": lambda positions, size: positions.astype(jnp.float32)[:, None] * frequencies(size)[None],
    "all positions": lambda positions, size: (jnp.arange(8192.0)[:, None] * frequencies(size))[positions],
    "jnp.outer": lambda positions, size: jnp.outer(positions.astype(jnp.float32), frequencies(size)),
}
HEADS, SIZE = 2, 8


@cache
def rotary() -> Case:
    """Scores of queries and keys rotated by positions up to 8191; the outputs are named by the way to the angles."""

    def loss(params: Any, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        q, k = (jnp.einsum("td,dhe->the", x, params[name]) for name in "qk")
        outputs = {}
        for name, angles in ANGLES.items():
            made = angles(positions, SIZE)
            outputs[name] = jnp.einsum("qhe,khe->hqk", rotate(q, made), rotate(k, made))
        return sum(jnp.mean(out**2) for out in outputs.values()), outputs

    draw, width = Draw(), HEADS * SIZE
    params = {name: draw(width, HEADS, SIZE, scale=width**-0.5) for name in "qk"}
    positions = jnp.array([0, 1, 2, 255, 256, 257, 2049, 4097, 8190, 8191], jnp.int32)
    return Case(loss, params, draw(len(positions), width, scale=1.0), positions)


def test_rotary_positions_up_to_8191_agree_with_float32(dtype: str) -> None:
    # An angle of 8191 in bfloat16 would be 8192, and every score of that row another one.
    check(rotary(), dtype, value=4, gradient=6)


def test_angles_made_by_a_product_of_matrices_need_disabled(dtype: str) -> None:
    """`einsum` of positions and frequencies is a dot like any other, and runs low; the page on JAX says so."""
    positions = jnp.array([257.0, 2049.0, 8191.0])

    def table(positions: jax.Array) -> jax.Array:
        return jnp.cos(jnp.einsum("i,j->ij", positions, frequencies(SIZE)))

    want = table(positions)
    got, jaxpr = run(autocast(table, dtype), positions)
    assert dots(jaxpr) == {(dtype,) * 3: 1}
    assert relative_error(got, want) > 50 * unit(dtype)
    # Sines and cosines of large angles differ in their last digits between jit and eager.
    assert relative_error(jax.jit(autocast(disabled()(table), dtype))(positions), want) < 1e-5
