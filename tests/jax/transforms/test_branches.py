"""Autocast of cond and switch: every branch is entered, and their results agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mezzo.jax import autocast

from .seen import BF16, F32, arrays, distance, dots, equations, signature

CLOSE = 2e-2


def by_bool(flag: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.cond(flag, lambda w, x: x @ w, lambda w, x: jnp.exp(x), w, x)


def by_index(index: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.switch(index, [lambda w, x: x @ w, lambda w, x: x, lambda w, x: jnp.exp(x @ w)], w, x)


def by_integer_predicate(number: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.cond(number, lambda: x @ w, lambda: w)


@pytest.mark.parametrize(
    ("choose", "values"),
    [(by_bool, [True, False]), (by_index, [0, 1, 2, 7]), (by_integer_predicate, [0, 3])],
    ids=["bool", "switch", "integer"],
)
def test_branches_of_unequal_dtypes_join(choose: Callable[..., jax.Array], values: list[Any]) -> None:
    w, x = arrays((3, 3), (3, 3))
    made = autocast(choose)
    assert set(dots(made, jnp.asarray(values[0]), w, x)) == {BF16}
    assert signature(made, values[0], w, x) == signature(choose, values[0], w, x)
    jitted, plain = jax.jit(made), jax.jit(choose)
    for value in values:
        assert distance(jitted(value, w, x), plain(value, w, x)) < CLOSE


def test_branches_that_are_all_low_give_a_low_result() -> None:
    def low(flag: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.cond(flag, lambda: x @ w, lambda: w @ x)

    w, x = arrays((3, 3), (3, 3))
    made = autocast(low, outputs="flow")
    assert jax.eval_shape(made, True, w, x).dtype == jnp.bfloat16
    assert jax.eval_shape(autocast(by_bool, outputs="flow"), True, w, x).dtype == jnp.float32


@pytest.mark.parametrize("order", ["grad(autocast)", "autocast(grad)"])
def test_the_gradient_goes_through_the_branch_taken(order: str) -> None:
    def loss(w: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.sum(by_index(index, w, x) ** 2)

    w, x = arrays((3, 3), (3, 3))
    w = w / 4
    made = jax.grad(autocast(loss)) if order == "grad(autocast)" else autocast(jax.grad(loss))
    assert set(dots(made, w, x, 0)) == {BF16}
    jitted, plain = jax.jit(made), jax.jit(jax.grad(loss))
    for index in (0, 1, 2):
        assert distance(jitted(w, x, index), plain(w, x, index)) < 2 * CLOSE


def test_a_batched_predicate_becomes_a_select() -> None:
    w, x = arrays((3, 3), (4, 3))
    flags = jnp.array([True, False, True, False])
    made, plain = (jax.vmap(f, in_axes=(0, None, 0)) for f in (autocast(by_bool), by_bool))
    outside = autocast(plain)
    for fn in (made, outside):
        assert set(dots(fn, flags, w, x)) == {BF16}
        assert "cond" not in [eqn.primitive.name for eqn in equations(fn, flags, w, x)]
        assert distance(jax.jit(fn)(flags, w, x), jax.jit(plain)(flags, w, x)) < CLOSE


def test_branches_return_pytrees_with_integers_and_constants() -> None:
    table = jnp.arange(9.0).reshape(3, 3)

    def choose(flag: jax.Array, x: jax.Array) -> dict[str, Any]:
        return lax.cond(
            flag,
            lambda: {"y": x @ table, "n": 1, "k": jax.random.key(0), "none": None, "const": 1.0},
            lambda: {"y": jnp.zeros((3, 3)), "n": 2, "k": jax.random.key(1), "none": None, "const": 2.0},
        )

    (x,) = arrays((3, 3))
    made = autocast(choose)
    assert dots(made, True, x) == {BF16: 1}
    assert signature(made, True, x) == signature(choose, True, x)
    got = jax.jit(made)(False, x)
    assert (int(got["n"]), float(got["const"])) == (2, 2.0)
    assert bool(jnp.all(jax.random.key_data(got["k"]) == jax.random.key_data(jax.random.key(1))))


def test_the_comparison_that_chooses_a_branch_sees_what_was_computed() -> None:
    def choose(x: jax.Array) -> jax.Array:
        return lax.cond(jnp.sum(x @ x) > 0.0, lambda: x @ x, lambda: -(x @ x))

    (x,) = arrays((3, 3))
    made = autocast(choose)
    assert dots(made, x) == {BF16: 3}
    assert [eqn.outvars[0].aval.dtype.name for eqn in equations(made, x) if eqn.primitive.name == "reduce_sum"] == [
        F32[0]
    ]
    assert distance(jax.jit(made)(x), jax.jit(choose)(x)) < CLOSE
