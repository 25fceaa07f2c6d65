"""Autocast under vmap and around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mezzo.jax import autocast

from .seen import BF16, F32, arrays, distance, dots, of, signature

Fn = Callable[..., Any]

CLOSE = 2e-2


def layer(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w + b)


@pytest.mark.parametrize(
    ("in_axes", "out_axes"),
    [((None, None, 0), 0), ((None, 0, 1), 1), ((0, 0, 0), 0), ((2, 1, None), -1)],
    ids=str,
)
def test_the_mapped_axes_are_free(in_axes: tuple[Any, ...], out_axes: int) -> None:
    shapes = [(3, 3), (3,), (2, 3)]
    full = [
        shape if axis is None else (*shape[:axis], 4, *shape[axis:])
        for shape, axis in zip(shapes, in_axes, strict=True)
    ]
    args = arrays(*full)
    plain = jax.vmap(layer, in_axes=in_axes, out_axes=out_axes)
    inside = jax.vmap(autocast(layer), in_axes=in_axes, out_axes=out_axes)
    for made in (inside, autocast(plain)):
        assert set(dots(made, *args)) == {BF16}
        assert signature(made, *args) == signature(plain, *args)
        assert distance(jax.jit(made)(*args), jax.jit(plain)(*args)) < CLOSE


def normalized(w: jax.Array, x: jax.Array) -> jax.Array:
    y = x @ w
    return (y - lax.pmean(y, "batch")) / lax.psum(1, "batch") + lax.axis_index("batch")


@pytest.mark.parametrize("order", ["vmap(autocast)", "autocast(vmap)"])
def test_collectives_see_the_axis_by_its_name(order: str) -> None:
    w, x = arrays((3, 3), (4, 3))
    plain = jax.vmap(normalized, in_axes=(None, 0), axis_name="batch")
    made = jax.vmap(autocast(normalized), in_axes=(None, 0), axis_name="batch")
    if order == "autocast(vmap)":
        made = autocast(plain)
    assert set(dots(made, w, x)) == {BF16}
    assert signature(made, w, x) == signature(plain, w, x)
    assert distance(jax.jit(made)(w, x), jax.jit(plain)(w, x)) < CLOSE


def test_a_vmap_of_a_vmap_and_of_dicts() -> None:
    def net(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        return {"y": layer(params["w"], params["b"], x), "n": jnp.int32(1) + jnp.int32(x.shape[0])}

    w, b, x = arrays((2, 3, 3), (3,), (4, 2, 5, 3))
    axes = ({"w": 0, "b": None}, 0)
    plain = jax.vmap(jax.vmap(net, in_axes=axes), in_axes=(None, 0))
    made = jax.vmap(jax.vmap(autocast(net), in_axes=axes), in_axes=(None, 0))
    args = ({"w": w, "b": b}, x)
    assert set(dots(made, *args)) == {BF16}
    assert signature(made, *args) == signature(plain, *args)
    assert distance(jax.jit(made)(*args), jax.jit(plain)(*args)) < CLOSE


def test_a_bias_shared_by_a_mapped_batch_sums_its_gradient_in_float32() -> None:
    w, b, x = arrays((3, 3), (3,), (4, 2, 3))

    def loss(b: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(layer, in_axes=(None, None, 0))(w, b, x))

    sums = of("reduce_sum", jax.grad(autocast(loss)), b)
    assert len(sums) >= 2
    assert {name for found in sums for name in found} == {"float32"}


def test_keys_and_integers_are_mapped_along() -> None:
    def noisy(w: jax.Array, x: jax.Array, key: jax.Array, shift: jax.Array) -> jax.Array:
        return jnp.roll(x @ w, shift) + jax.random.normal(key, (3,))

    w, x = arrays((3, 3), (4, 3))
    args = (w, x, jax.random.split(jax.random.key(1), 4), jnp.arange(4))
    plain = jax.vmap(noisy, in_axes=(None, 0, 0, 0))
    made = jax.vmap(autocast(noisy), in_axes=(None, 0, 0, 0))
    assert set(dots(made, *args)) == {BF16}
    assert distance(jax.jit(made)(*args), jax.jit(plain)(*args)) < CLOSE


def test_a_custom_batching_rule_is_kept() -> None:
    calls: list[str] = []

    @jax.custom_batching.custom_vmap
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y

    @product.def_vmap  # type: ignore[untyped-decorator]
    def rule(size: int, batched: list[bool], x: jax.Array, y: jax.Array) -> tuple[jax.Array, bool]:
        calls.append("rule")
        return jnp.einsum("bij,bjk->bik", x, y), True

    def net(x: jax.Array, y: jax.Array) -> jax.Array:
        return product(x @ x, y)

    x, y = arrays((4, 3, 3), (4, 3, 3))
    made = jax.vmap(autocast(net))
    # The function with a rule of its own is opaque: the traced dtypes, and so a float32 dot.
    assert dots(made, x, y) == {BF16: 1, F32: 1}
    assert calls
    assert signature(made, x, y) == signature(jax.vmap(net), x, y)
    assert distance(jax.jit(made)(x, y), jax.jit(jax.vmap(net))(x, y)) < CLOSE
    (single_x, single_y) = arrays((3, 3), (3, 3))
    assert distance(jax.jit(autocast(net))(single_x, single_y), net(single_x, single_y)) < CLOSE
