"""Models of Flax, Equinox and Optax: shown by the lines and modules of their users, without false alarms."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax import Array
from jax import numpy as jnp

from mezzo.jax import autocast
from mezzo.jax.explain import explain

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

IDS = jnp.zeros((2, 4), jnp.int32)


class Block(nn.Module):  # type: ignore[misc, name-defined]
    @nn.compact  # type: ignore[misc]
    def __call__(self, x: Array) -> Array:
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.gelu(nn.Dense(16, name="up")(nn.LayerNorm()(x))))


class Model(nn.Module):  # type: ignore[misc, name-defined]
    @nn.compact  # type: ignore[misc]
    def __call__(self, ids: Array) -> Array:
        embed = nn.Embed(10, 8)
        return embed.attend(Block()(embed(ids)))


def test_a_linen_transformer_is_shown_by_its_modules_and_lines() -> None:
    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), IDS)

    def loss(params: Any, ids: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, ids), ids).mean()

    report = explain(jax.jit(jax.value_and_grad(autocast(loss))))(params, IDS)
    assert report.warnings == ()
    assert report.notes == ()
    # Query, key, value, two of attention, out, two dense layers, and the logits.
    assert [(dot.used, dot.count) for dot in report.dots] == [(("bfloat16", "bfloat16"), 9)]
    (up,) = report.where(path="Block_0/up", dot=True).records
    assert up.source is not None
    assert (up.source.file, up.source.function) == (__file__, "Block.__call__")
    assert {record.source.file for record in report.records if record.source} == {__file__}
    assert report.regions[0].residuals is not None
    assert report.regions[0].residuals.plain is not None


def test_a_cast_in_a_flax_module_that_matters_is_told_by_the_users_line() -> None:
    class Careful(nn.Module):  # type: ignore[misc, name-defined]
        @nn.compact  # type: ignore[misc]
        def __call__(self, x: Array) -> Array:
            return jnp.sum(nn.Dense(8)(x).astype(jnp.float32) - 1.0)

    x = jnp.ones((2, 4))
    params = jax.eval_shape(Careful().init, jax.random.key(0), x)
    (finding,) = explain(Careful().apply)(params, x).warnings
    assert finding.kind == "invisible cast"
    assert finding.source is not None
    assert finding.source.file == __file__


def test_an_nnx_step_is_explained_and_its_model_stays() -> None:
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    before = model.kernel.get_value()

    @nnx.jit  # type: ignore[misc]
    def step(model: Any, x: Array) -> Array:
        graph, state = nnx.split(model)
        gradients = jax.grad(autocast(lambda state, x: jnp.sum(nnx.merge(graph, state)(x))))(state, x)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, state, gradients))
        return jnp.sum(x)

    report = explain(step)(model, jnp.ones((2, 4)))
    assert [dot.used for dot in report.dots] == [("bfloat16", "bfloat16")]
    assert model.kernel.get_value() is before


def test_an_equinox_step_is_explained() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.filter_eval_shape(lambda key: eqx.nn.MLP(4, 3, 8, 1, key=key), jax.random.key(0))

    @eqx.filter_jit  # type: ignore[misc]
    def step(model: Any, x: Array) -> Any:
        return eqx.filter_grad(autocast(lambda model, x: jnp.sum(jax.vmap(model)(x))))(model, x)

    report = explain(step)(model, jnp.ones((2, 4)))
    assert report.warnings == ()
    assert [(dot.used, dot.count) for dot in report.dots] == [(("bfloat16", "bfloat16"), 2)]
    assert all("eqx.nn.Linear" in "/".join(record.path) for record in report.where(dot=True).records)
