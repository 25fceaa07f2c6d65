"""Models of flax.linen, as they are written: no `dtype=` anywhere."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mezzo.jax import autocast

from .nets import LOW_DTYPES, Case, Draw, check, cross_entropy, dots

pytestmark = pytest.mark.parametrize("dtype", LOW_DTYPES)


class Images(nn.Module):
    """A convolution with batch norm, dropout, and two dense layers with layer norm between."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Conv(8, (3, 3), strides=2, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, (2, 2), strides=(2, 2)).reshape(len(x), -1)
        x = nn.Dropout(0.25, deterministic=not train)(x)
        x = nn.LayerNorm()(nn.Dense(16)(x))
        return nn.Dense(4)(nn.gelu(x))


@cache
def images() -> Case:
    model, draw = Images(), Draw()
    x, labels = draw(8, 8, 8, 3, scale=1.0), jnp.arange(8) % 4
    state = draw.fill(jax.eval_shape(lambda: model.init(jax.random.key(0), x, train=False)))

    def loss(params: Any, statistics: Any, key: jax.Array, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": statistics}
        logits, new = model.apply(variables, x, train=True, rngs={"dropout": key}, mutable=["batch_stats"])
        return cross_entropy(logits, labels), (logits, new["batch_stats"])

    return Case(loss, state["params"], state["batch_stats"], jax.random.key(1), x, labels)


def test_convolution_norms_dropout_and_dense_layers_agree_with_float32(dtype: str) -> None:
    # The same units are dropped: else nothing would agree.
    (_, (_, statistics)), _ = check(images(), dtype, value=3, gradient=8)
    norm = statistics["BatchNorm_0"]
    assert {leaf.dtype for leaf in jax.tree.leaves(norm)} == {np.dtype("float32")}
    assert float(jnp.abs(norm["mean"]).max()) > 0.0
    assert float(jnp.abs(norm["var"] - 1).max()) > 0.0


class Block(nn.Module):
    """A transformer's layer after an embedding, with logits from the embedding's table."""

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        embed = nn.Embed(16, 8)
        x = embed(ids)
        x = x + nn.MultiHeadDotProductAttention(2, use_bias=False)(nn.LayerNorm()(x), mask=mask)
        h = nn.LayerNorm(use_fast_variance=False)(x)
        return embed.attend(x + nn.Dense(8)(nn.silu(nn.Dense(16)(h))))


@cache
def block() -> Case:
    model = Block()
    ids = jnp.arange(12).reshape(2, 6) * 5 % 16
    mask = nn.combine_masks(nn.make_causal_mask(ids), jnp.ones((2, 1, 6, 6)).at[1, 0, 2].set(0))
    params = Draw().fill(jax.eval_shape(lambda: model.init(jax.random.key(0), ids, mask)))

    def loss(params: Any, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.apply(params, ids, mask)
        return cross_entropy(logits.reshape(-1, 16), ids.reshape(-1)), logits

    return Case(loss, params, ids, mask)


def test_a_masked_attention_block_agrees_with_float32(dtype: str) -> None:
    check(block(), dtype, value=4, gradient=8)


def test_the_model_may_be_initialised_under_autocast(dtype: str) -> None:
    """Only shapes and dtypes: `init` runs the net, and its parameters come out as float32."""
    model, x = Images(), jnp.ones((2, 8, 8, 3))

    def init(key: jax.Array) -> Any:
        return model.init(key, x, train=False)

    key = jax.random.key(0)
    assert jax.eval_shape(autocast(init, dtype), key) == jax.eval_shape(init, key)
    assert dots(jax.make_jaxpr(autocast(init, dtype))(key)) == {(dtype,) * 3: 3}
