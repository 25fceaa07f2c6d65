"""Models of flax.nnx: split into a graph and its state, which goes in and comes out."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from .nets import LOW_DTYPES, Case, Draw, bits, check

pytestmark = pytest.mark.parametrize("dtype", LOW_DTYPES)


class Model(nnx.Module):
    """A convolution with batch norm, dropout, and a dense layer behind a layer norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, 8, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.layer_norm = nnx.LayerNorm(8, rngs=rngs)
        self.dense = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.gelu(self.batch_norm(self.conv(x))).mean((1, 2))
        return self.dense(self.dropout(self.layer_norm(x)))


@cache
def model() -> Case:
    graph, *shapes = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param, ...)
    draw = Draw()
    params, rest = draw.fill(shapes)

    def loss(params: Any, rest: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        net = nnx.merge(graph, params, rest, copy=True)
        net.train()
        out = net(x)
        _, _, new = nnx.split(net, nnx.Param, ...)
        return jnp.mean((out - 1.0) ** 2), (out, new)

    return Case(loss, params, rest, draw(4, 8, 8, 3, scale=1.0))


def test_a_model_whose_state_is_passed_agrees_with_float32(dtype: str) -> None:
    (_, (_, after)), _ = check(model(), dtype, value=3, gradient=6)
    # The counter of the dropout moves on, and so do the running statistics, which stay float32.
    _, before, _ = model().args
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(before)]
    pairs = zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(before), strict=True)
    names = [jax.tree_util.keystr(path) for (path, one), other in pairs if not np.array_equal(bits(one), bits(other))]
    assert any("mean" in name for name in names)
    assert any("var" in name for name in names)
    assert any("count" in name for name in names)
