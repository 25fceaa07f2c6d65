"""Autocast in autocast, and the scopes that switch it off: the inner one decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mezzo.jax import autocast, disabled

from .seen import BF16, F16, F32, arrays, distance, dots, of, signature

Fn = Callable[..., Any]


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


AROUND: dict[str, Fn] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda w, x: lax.scan(lambda h, _: (f(w, h), None), x, None, 2)[0],
    "cond": lambda f: lambda w, x: lax.cond(x[0, 0] > 0, f, lambda w, x: x, w, x),
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda w, x: jax.vmap(lambda row: f(w, row[None])[0])(x),
    "jit of scan": lambda f: jax.jit(lambda w, x: lax.scan(lambda h, _: (f(w, h), None), x, None, 2)[0]),
}

INNER: dict[str, tuple[Fn, tuple[str, ...]]] = {
    "float16": (lambda f: autocast(f, dtype="float16"), F16),
    "bfloat16": (autocast, BF16),
    "fp32": (lambda f: autocast(f, policy="fp32"), F32),
    "not enabled": (lambda f: autocast(f, enabled=False), F32),
    "disabled decorator": (disabled(), F32),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("around", AROUND)
def test_the_inner_one_decides(around: str, inner: str) -> None:
    transform, expected = INNER[inner]

    def both(w: jax.Array, x: jax.Array) -> jax.Array:
        return AROUND[around](transform(product))(w, x) @ w

    w, x = arrays((3, 3), (2, 3))
    outer_low = F16 if inner == "bfloat16" else BF16
    made = autocast(both, dtype=outer_low[0])
    assert dots(made, w, x) == {expected: 1, outer_low: 1}
    assert signature(made, w, x) == signature(both, w, x)


@pytest.mark.parametrize("order", ["grad(outer)", "outer(grad(inner))"])
def test_derivatives_of_the_inner_one_keep_its_dtypes(order: str) -> None:
    w, x = arrays((3, 3), (2, 3))
    inner = autocast(product, dtype="float16")
    if order == "grad(outer)":
        made = jax.grad(autocast(lambda w, x: jnp.sum(inner(w, x) @ w)))
    else:
        made = autocast(jax.grad(lambda w, x: jnp.sum(inner(w, x) @ w)))
    # The backward of the inner one belongs to it.
    assert dots(made, w, x) == {F16: 2, BF16: 3}
    want = jax.grad(lambda w, x: jnp.sum(product(w, x) @ w))(w, x)
    assert distance(jax.jit(made)(w, x), want) < 3e-2


def test_disabled_is_a_context_and_a_decorator() -> None:
    @disabled()
    def exact(w: jax.Array, x: jax.Array) -> jax.Array:
        """Exact."""
        return x @ w

    def both(w: jax.Array, x: jax.Array) -> jax.Array:
        with disabled():
            y = x @ w
            with disabled():
                y = y @ w
            y = y @ w
        y = y @ w
        return exact(w, y) @ w

    w, x = arrays((3, 3), (2, 3))
    assert dots(autocast(both), w, x) == {F32: 4, BF16: 2}
    assert (exact.__name__, exact.__doc__) == ("exact", "Exact.")
    # Outside of autocast it changes nothing.
    assert dots(both, w, x) == {F32: 6}


@pytest.mark.parametrize("around", AROUND)
def test_what_goes_into_a_disabled_scope_has_its_traced_dtype(around: str) -> None:
    def net(w: jax.Array, x: jax.Array) -> jax.Array:
        low = x @ w
        with disabled():
            return AROUND[around](lambda w, low: low + low @ w)(w, low)

    w, x = arrays((3, 3), (2, 3))
    made = autocast(net, outputs="flow")
    assert dots(made, w, x) == {BF16: 1, F32: 1}
    assert jax.eval_shape(made, w, x).dtype == jnp.float32
    assert {found for found in of("add", made, w, x) if len(found) == 3} == {F32}


@pytest.mark.parametrize("order", ["grad(autocast)", "autocast(grad)"])
def test_the_backward_of_a_disabled_scope_is_disabled_too(order: str) -> None:
    def loss(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w)
        with disabled():
            h = jnp.tanh(h @ v)
        return jnp.sum(h**2)

    w, v, x = arrays((3, 3), (3, 3), (2, 3))
    made = jax.grad(autocast(loss), (0, 1)) if order == "grad(autocast)" else autocast(jax.grad(loss, (0, 1)))
    # Of w: product and gradient; of v: product, gradient, and the gradient of its input.
    assert dots(made, w, v, x) == {BF16: 2, F32: 3}


def test_autocast_called_in_a_disabled_scope_is_enabled() -> None:
    def both(w: jax.Array, x: jax.Array) -> jax.Array:
        with disabled():
            return autocast(product)(w, x) @ w

    w, x = arrays((3, 3), (2, 3))
    assert dots(both, w, x) == {BF16: 1, F32: 1}
    assert dots(autocast(both, dtype="float16"), w, x) == {BF16: 1, F32: 1}
    assert dots(autocast(both, enabled=False), w, x) == {BF16: 1, F32: 1}


def test_not_enabled_is_the_function_itself() -> None:
    w, x = arrays((3, 3), (2, 3))
    made = autocast(product, enabled=False)
    assert dots(made, w, x) == {F32: 1}
    assert str(jax.make_jaxpr(made)(w, x)) == str(jax.make_jaxpr(product)(w, x))
    # Nothing is traced: Python sees the arrays.
    seen: list[Any] = []
    autocast(seen.append, enabled=False)(w)
    assert seen[0] is w


def test_a_region_within_a_region_of_its_own_kind_three_deep() -> None:
    def deep(w: jax.Array, x: jax.Array) -> jax.Array:
        @autocast(dtype="float16")
        def middle(w: jax.Array, x: jax.Array) -> jax.Array:
            with disabled():
                y = x @ w
            return autocast(product)(w, y) @ w

        return middle(w, x) @ w

    w, x = arrays((3, 3), (2, 3))
    assert dots(autocast(deep), w, x) == {F32: 1, BF16: 2, F16: 1}
    assert dots(jax.jit(autocast(jax.jit(deep))), w, x) == {F32: 1, BF16: 2, F16: 1}
