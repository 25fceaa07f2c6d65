"""Casts that the user writes: seen, invisible, made visible by `upcast`, and made before tracing by `cast_inputs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mezzo.jax import autocast, cast_inputs, disabled, upcast

from .seen import BF16, F16, F32, arrays, distance, dots, equations, of, signature

Fn = Callable[..., Any]


def test_a_cast_between_dtypes_is_honoured() -> None:
    def net(x: jax.Array) -> Any:
        y = x @ x
        down = x.astype(jnp.bfloat16)
        half = (x @ x).astype(jnp.float16)
        return jnp.tanh(down), down.astype(jnp.float32) + 1.0, half + 1.0, y.astype(jnp.int32)

    (x,) = arrays((3, 3))
    made = autocast(net, outputs="flow")
    found = [leaf.dtype.name for leaf in jax.eval_shape(made, x)]
    assert found == ["bfloat16", "float32", "float16", "int32"]
    assert dots(made, x) == {BF16: 2}


def test_a_product_of_operands_that_the_user_made_low_is_left_alone() -> None:
    (x,) = arrays((3, 3))
    half = x.astype(jnp.float16)
    assert dots(autocast(lambda x: x @ x), half) == {F16: 1}
    assert dots(autocast(lambda x, half: half @ x), x, half) == {BF16: 1}


UPCAST_AROUND: dict[str, Fn] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0],
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "remat": jax.checkpoint,
}


@pytest.mark.parametrize("around", UPCAST_AROUND)
def test_upcast_survives_tracing_and_makes_the_rest_float32(around: str) -> None:
    def shifted(up: Fn) -> Fn:
        return lambda x: jnp.abs(up(x @ x) + 1000.0 - 1000.0)

    (x,) = arrays((3, 3))
    exact = autocast(UPCAST_AROUND[around](shifted(upcast)), outputs="flow")
    lost = autocast(UPCAST_AROUND[around](shifted(lambda y: y.astype(jnp.float32))), outputs="flow")
    assert dots(exact, x) == dots(lost, x) == {BF16: 1}
    assert of("add", exact, x) == [F32]
    assert of("sub", exact, x) == [F32]
    # Documented: a cast to the dtype that a value is traced in leaves nothing to see.
    assert of("add", lost, x) == [BF16]


def test_a_large_mean_needs_the_cast_to_be_seen() -> None:
    def deviation(up: Fn) -> Fn:
        def fn(x: jax.Array, w: jax.Array) -> jax.Array:
            h = up(x @ w) + 300.0
            return h - 300.0

        return fn

    x, w = arrays((64, 8), (8, 8))
    want = jax.jit(deviation(lambda y: y))(x, w)
    # Un-jitted: XLA may keep more digits inside of a fused kernel.
    assert distance(autocast(deviation(upcast))(x, w), want) < 5e-3
    assert distance(autocast(deviation(lambda y: y.astype(jnp.float32)))(x, w), want) > 0.1
    with_scope = autocast(disabled()(deviation(lambda y: y)))
    assert distance(with_scope(x, w), want) < 1e-5


def test_the_table_saves_a_variance_whose_cast_is_not_seen() -> None:
    def variance(x: jax.Array, w: jax.Array) -> jax.Array:
        h = (x @ w).astype(jnp.float32) + 30.0
        return jnp.mean(h * h) - jnp.mean(h) ** 2

    x, w = arrays((64, 8), (8, 8))
    made = autocast(variance)
    assert dots(made, x, w) == {BF16: 1}
    assert of("mul", made, x, w) == [F32]
    assert distance(jax.jit(made)(x, w), jax.jit(variance)(x, w)) < 2e-2


def test_upcast_has_the_gradient_of_a_cast() -> None:
    (x,) = arrays((3, 3))
    made = jax.grad(autocast(lambda x: jnp.sum(upcast(x @ x) ** 2)))
    assert set(dots(made, x)) == {BF16}
    want = jax.jit(jax.grad(lambda x: jnp.sum((x @ x) ** 2)))(x)
    assert distance(jax.jit(made)(x), want) < 3e-2
    assert made(x).dtype == jnp.float32


def test_upcast_of_trees_and_outside_of_autocast() -> None:
    tree = {
        "wide": jnp.float32(1.1),
        "low": jnp.bfloat16(1.5),
        "half": np.float16(2.5),
        "int": jnp.int32(3),
        "bool": jnp.array([True]),
        "key": jax.random.key(0),
        "complex": jnp.complex64(1j),
        "none": None,
        "python": 2.5,
        "text": "text",
    }
    got = upcast(tree)
    assert [got[name].dtype.name for name in ("wide", "low", "half", "int", "bool")] == ["float32"] * 3 + [
        "int32",
        "bool",
    ]
    assert got["wide"] == tree["wide"]
    assert (float(got["low"]), float(got["half"])) == (1.5, 2.5)
    for name in ("int", "bool", "key", "complex", "none", "text"):
        assert got[name] is tree[name]
    assert got["python"] == 2.5
    special = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1e-45, -0.0, 3.4e38])
    assert np.array_equal(np.asarray(upcast(special)).view(np.int32)[:5], np.asarray(special).view(np.int32)[:5])
    with jax.enable_x64(True):
        double = jnp.ones(2, jnp.float64)
        assert upcast(double) is double


# cast_inputs


def test_arguments_are_cast_before_the_function_sees_them() -> None:
    seen: list[Any] = []

    def kernel(q: jax.Array, extra: dict[str, Any], *, scale: float) -> jax.Array:
        seen.append((q.dtype.name, {name: getattr(leaf, "dtype", leaf) for name, leaf in extra.items()}, scale))
        return q @ q.T * scale

    (q,) = arrays((3, 3))
    made = cast_inputs(kernel)
    extra = {"ids": jnp.arange(2), "mask": jnp.array([True]), "low": q.astype(jnp.float16), "none": None, "n": 2.0}
    got = made(q, extra, scale=0.5)
    assert got.dtype == jnp.float32
    kinds = {"ids": jnp.int32, "mask": jnp.bool_, "low": jnp.float16, "none": None, "n": 2.0}
    assert seen == [("bfloat16", kinds, 0.5)]
    assert distance(got, q @ q.T * 0.5) < 1e-2
    assert made.__wrapped__ is kernel
    assert cast_inputs(kernel, outputs="flow")(q, extra, scale=0.5).dtype == jnp.bfloat16
    assert cast_inputs(dtype="float16", outputs="flow")(kernel)(q, extra, scale=0.5).dtype == jnp.float16


def test_numpys_float64_counts_as_float32_where_jax_has_no_float64() -> None:
    made = cast_inputs(jnp.asarray, outputs="flow")
    assert made(np.ones(2)).dtype == jnp.bfloat16
    with jax.enable_x64(True):
        assert made(np.ones(2)).dtype == jnp.float64


def test_only_low_results_are_cast_back() -> None:
    def several(x: jax.Array) -> Any:
        return x, x.astype(jnp.float16), x.astype(jnp.float32), jnp.argmax(x), jax.random.key(0), None

    (x,) = arrays((3,))
    found = [leaf.dtype.name for leaf in jax.tree.leaves(jax.eval_shape(cast_inputs(several), x))][:4]
    assert found[0] == found[2] == "float32"
    assert found[3] == "int32"


def test_within_autocast_the_casts_are_honoured_and_gradients_are_float32() -> None:
    def attention(q: jax.Array, k: jax.Array) -> jax.Array:
        assert q.dtype == k.dtype == jnp.bfloat16
        return jax.nn.softmax(q @ k.T) @ k

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(cast_inputs(attention)(x @ w, x) ** 2)

    w, x = arrays((3, 3), (4, 3))
    for made in (jax.grad(autocast(loss)), autocast(jax.grad(loss))):
        assert set(dots(made, w, x)) == {BF16}
        assert signature(made, w, x) == ((3, 3), "float32", False)
    plain = jax.grad(lambda w: jnp.sum((jax.nn.softmax((x @ w) @ x.T) @ x) ** 2))
    assert distance(jax.jit(jax.grad(autocast(loss)))(w, x), jax.jit(plain)(w)) < 5e-2


def test_a_double_cast_is_not_made() -> None:
    (x,) = arrays((3, 3))
    made = autocast(cast_inputs(lambda a: a @ a))
    casts = [eqn for eqn in equations(made, x) if eqn.primitive.name == "convert_element_type"]
    assert dots(made, x) == {BF16: 1}
    assert len(casts) == 2  # down, and the result up
