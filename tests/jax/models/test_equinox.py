"""Models of Equinox: modules are pytrees whose other leaves, as functions and numbers, stay what they are."""

from __future__ import annotations

from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mezzo.jax import autocast

from .nets import LOW_DTYPES, Draw, check_close, check_dots, dots, same_bits, unit

pytestmark = pytest.mark.parametrize("dtype", LOW_DTYPES)


class Model(eqx.Module):
    """Attention and an MLP, each behind a layer norm, for one sequence; `use_norm` is a leaf that is no array."""

    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP
    use_norm: bool

    def __init__(self, key: jax.Array) -> None:
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=one)
        self.norms = [eqx.nn.LayerNorm(8), eqx.nn.LayerNorm(8)]
        self.mlp = eqx.nn.MLP(8, 8, 16, 2, activation=jax.nn.gelu, key=two)
        self.use_norm = True

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        h = jax.vmap(self.norms[0])(x) if self.use_norm else x
        x = x + self.attention(h, h, h, mask=mask)
        h = jax.vmap(self.norms[1])(x) if self.use_norm else x
        return x + jax.vmap(self.mlp)(h)


def loss(model: Model, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = jax.vmap(lambda x: model(x, mask))(x)
    return jnp.mean((out - 1.0) ** 2), out


@cache
def inputs() -> tuple[Model, jax.Array, jax.Array]:
    shapes = eqx.filter_eval_shape(Model, jax.random.key(0))
    arrays, others = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    draw = Draw()
    return eqx.combine(draw.fill(arrays), others), draw(3, 6, 8, scale=1.0), jnp.tril(jnp.ones((6, 6), bool))


@cache
def expected() -> Any:
    return eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(*inputs())


def test_a_module_agrees_with_float32(dtype: str) -> None:
    step = eqx.filter_jit(eqx.filter_value_and_grad(autocast(loss, dtype), has_aux=True))
    got, want = step(*inputs()), expected()
    assert jax.tree.structure(got[1]) == jax.tree.structure(want[1])
    assert not same_bits(got, want)
    check_close(got[0], want[0], 2 * unit(dtype))
    check_close(got[1], want[1], 4 * unit(dtype))


def test_all_products_of_a_module_run_low(dtype: str) -> None:
    arrays, others = eqx.partition(inputs()[0], eqx.is_array)

    def jaxpr_of(fn: Any) -> Any:
        def step(arrays: Any, *data: jax.Array) -> Any:
            return jax.grad(lambda arrays: fn(eqx.combine(arrays, others), *data), has_aux=True)(arrays)

        return jax.make_jaxpr(step)(arrays, *inputs()[1:])

    check_dots(jaxpr_of(autocast(loss, dtype)), dtype, total=dots(jaxpr_of(loss)).total())


def test_a_module_called_under_autocast_is_given_its_own_leaves(dtype: str) -> None:
    """A function and a Python bool stay static: `if self.use_norm` would fail on a traced one."""
    seen = []

    def call(model: Model, x: jax.Array, mask: jax.Array) -> jax.Array:
        seen.append((model.use_norm, model.mlp.activation))
        return model(x, mask)

    model, xs, mask = inputs()
    jaxpr, out, _ = eqx.filter_make_jaxpr(autocast(call, dtype))(model, xs[0], mask)
    assert seen == [(True, model.mlp.activation)]
    assert out.dtype == np.float32
    check_dots(jaxpr, dtype, total=dots(eqx.filter_make_jaxpr(Model.__call__)(model, xs[0], mask)[0]).total())
