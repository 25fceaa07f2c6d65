"""Stored float32 arrays that are broadcast against a low activation: biases, scales, positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mezzo.jax import autocast

from .seen import BF16, F16, F32, arrays, distance, dots, of

Fn = Callable[..., Any]

ROWS, WIDTH = 5, 3


def inputs() -> list[jax.Array]:
    return arrays((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,))


STORED: dict[str, Fn] = {
    "as it is": lambda b: b,
    "with a new axis": lambda b: b[None, :],
    "reshaped": lambda b: b.reshape(1, WIDTH),
    "broadcast by hand": lambda b: jnp.broadcast_to(b, (ROWS, WIDTH)),
    "reversed": lambda b: b[::-1],
    "transposed": lambda b: b[:, None].T,
    "a slice": lambda b: jnp.stack([b, b])[0] if False else lax.dynamic_slice(b, (0,), (WIDTH,)),
    "behind jit": jax.jit(lambda b: b[None, :]),
    "stop_gradient": lax.stop_gradient,
    "copied": jnp.copy,
    "a constant": lambda b: jnp.asarray(np.arange(WIDTH, dtype=np.float32)),
}


@pytest.mark.parametrize("low", [BF16, F16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("how", STORED)
def test_a_stored_array_that_is_broadcast_adapts(how: str, low: tuple[str, ...]) -> None:
    x, w, b = inputs()
    made = autocast(lambda x, w, b: (x @ w + STORED[how](b)) * STORED[how](b), dtype=low[0], outputs="flow")
    assert dots(made, x, w, b) == {low: 1}
    assert of("add", made, x, w, b) == [low]
    assert of("mul", made, x, w, b) == [low]
    promoted = autocast(lambda x, w, b: x @ w + STORED[how](b), dtype=low[0], outputs="flow", bias="promote")
    assert dots(promoted, x, w, b) == {low: 1}
    assert of("add", promoted, x, w, b) == [F32]


OTHERS: dict[str, Fn] = {
    "computed": lambda x, b: jnp.exp(b),
    "of the same shape": lambda x, b: x,
    "of the same shape, moved": lambda x, b: x[::-1],
    "a product with a number": lambda x, b: b * 2.0,
}


@pytest.mark.parametrize("how", OTHERS)
def test_what_was_computed_or_is_not_broadcast_promotes(how: str) -> None:
    x, w, b = inputs()
    made = autocast(lambda x, w, b: x @ w + OTHERS[how](x, b), outputs="flow")
    assert dots(made, x, w, b) == {BF16: 1}
    assert of("add", made, x, w, b) == [F32]


def test_a_stored_scalar_promotes() -> None:
    x, w, _ = inputs()
    # It may be a loss scale, which float16 cannot hold.
    made = autocast(lambda x, w, scale: (x @ w) * scale, outputs="flow")
    assert dots(made, x, w, jnp.float32(65536.0)) == {BF16: 1}
    assert jax.eval_shape(made, x, w, jnp.float32(65536.0)).dtype == jnp.float32


@pytest.mark.parametrize("bias", ["adapt", "promote"])
@pytest.mark.parametrize("where", ["plain", "jit", "scan", "remat", "cond"])
def test_the_gradient_of_a_bias_is_summed_in_float32(where: str, bias: Any) -> None:
    def layer(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w + b)

    around: dict[str, Fn] = {
        "plain": layer,
        "jit": jax.jit(layer),
        "scan": lambda x, w, b: lax.scan(lambda c, x: (c, layer(x, w, b)), 0, x[None])[1],
        "remat": jax.checkpoint(layer),
        "cond": lambda x, w, b: lax.cond(x[0, 0] < 9.0, layer, lambda x, w, b: x, x, w, b),
    }
    x, w, b = inputs()
    made = jax.grad(lambda b: jnp.sum(autocast(around[where], bias=bias)(x, w, b)))
    assert set(dots(made, b)) == {BF16}
    sums = of("reduce_sum", made, b)
    assert sums
    assert set(sums) == {F32[:2]}


@pytest.mark.parametrize(
    "shape", [(WIDTH,), (1, WIDTH), (ROWS, 1), (ROWS, WIDTH), (1, ROWS, WIDTH), (4, 1, WIDTH)], ids=str
)
@pytest.mark.parametrize("low", [BF16, F16], ids=["bfloat16", "float16"])
def test_gradients_of_stored_arrays_of_any_shape_are_summed_in_float32(low: tuple[str, ...], shape: Any) -> None:
    x, w, b = arrays((4, ROWS, WIDTH), (WIDTH, WIDTH), shape)

    def loss(b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh((x @ w + b) * b))

    made = autocast(loss, dtype=low[0])
    assert of("add", made, b) == [low]
    sums = of("reduce_sum", jax.grad(made), b)
    assert len(sums) >= 3
    assert set(sums) == {F32[:2]}


def test_a_bias_gradient_over_many_rows_is_as_good_as_float32() -> None:
    rows = 20_000
    (x,) = arrays((rows, 2))
    w, b = jnp.eye(2), jnp.zeros(2)

    def loss(b: jax.Array) -> jax.Array:
        return jnp.sum((x @ w + b) * jnp.array([0.3, 0.7]))

    got = jax.jit(jax.grad(autocast(loss)))(b)
    # Every row's share was rounded to 8 bits in the same way; a sum in bfloat16 would stop growing at 256 shares.
    assert distance(got, rows * np.array([0.3, 0.7])) < 2**-8


def test_layers_of_biases_scanned_over_adapt() -> None:
    x, w, b = inputs()
    ws, bs = jnp.stack([w, w]), jnp.stack([b, b])

    def net(x: jax.Array, ws: jax.Array, bs: jax.Array) -> jax.Array:
        return lax.scan(lambda h, each: (jax.nn.relu(h @ each[0] + each[1]), None), x, (ws, bs))[0]

    made = autocast(net)
    assert dots(made, x, ws, bs) == {BF16: 1}
    assert of("add", made, x, ws, bs) == [BF16]
    assert distance(jax.jit(made)(x, ws, bs), jax.jit(net)(x, ws, bs)) < 2e-2


def test_a_closed_over_bias_adapts_too() -> None:
    x, w, b = inputs()
    made = autocast(lambda x: jax.jit(lambda y: y + b)(x @ w) * b, outputs="flow")
    assert dots(made, x) == {BF16: 1}
    assert of("add", made, x) == [BF16]
    assert of("mul", made, x) == [BF16]


def test_a_convolution_with_bias_and_scale_stays_low() -> None:
    x, k, b = arrays((1, 6, 6, 2), (3, 3, 2, 4), (4,))

    def conv(x: jax.Array, k: jax.Array, b: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y * b.reshape(1, 1, 1, 4) + b)

    made = autocast(conv, outputs="flow")
    assert dots(made, x, k, b) == {BF16: 1}
    assert jax.eval_shape(made, x, k, b).dtype == jnp.bfloat16
    assert distance(jax.jit(autocast(conv))(x, k, b), jax.jit(conv)(x, k, b)) < 2e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_mask_given_as_an_array_makes_no_nan(dtype: str) -> None:
    x, w, _ = inputs()
    mask = jnp.where(jnp.tri(ROWS, WIDTH) > 0, 0.0, -1e9).at[0].set(-1e9)

    def attend(x: jax.Array, w: jax.Array, mask: jax.Array) -> jax.Array:
        return jax.nn.softmax((x @ w)[None] + mask, axis=-1)

    made = autocast(attend, dtype=dtype)
    assert dots(made, x, w, mask) == {(dtype,) * 3: 1}
    got, want = jax.jit(made)(x, w, mask), jax.jit(attend)(x, w, mask)
    assert bool(jnp.all(jnp.isfinite(got)))
    # A row that is masked everywhere has no right answer but an even one; the others have no NaN to hide.
    assert distance(got[0, 1:], want[0, 1:]) < 2e-2
