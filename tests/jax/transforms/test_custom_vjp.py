"""Autocast of functions with a backward rule of their own: left alone, or entered on request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mezzo.jax import autocast

from .seen import BF16, F32, arrays, distance, dots, signature

Fn = Callable[..., Any]

CLOSE = 3e-2


@jax.custom_vjp
def kernel(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product whose gradients are, unlike the true ones, tripled."""
    return jnp.sin(x @ w)


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    y = x @ w
    return jnp.sin(y), (x, w, y)


def _backward(kept: tuple[jax.Array, jax.Array, jax.Array], ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w, y = kept
    ct = 3.0 * ct * jnp.cos(y)
    assert ct.dtype == x.dtype == w.dtype == jnp.float32  # a library may count on it
    return ct @ w.T, x.T @ ct


kernel.defvjp(_forward, _backward)


def loss(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(kernel(x @ w, w) ** 2)


ORDERS: dict[str, Fn] = {
    "grad(autocast)": lambda f, **options: jax.grad(autocast(f, **options), (0, 1)),
    "autocast(grad)": lambda f, **options: autocast(jax.grad(f, (0, 1)), **options),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("rule", "entered"),
    [("opaque", False), ("enter", True), ({"kernel": "enter"}, True), ({"other": "enter"}, False), ({}, False)],
    ids=str,
)
def test_it_is_opaque_by_default_and_entered_by_request_or_name(order: str, rule: Any, entered: bool) -> None:
    x, w = arrays((2, 3), (3, 3))
    made, plain = ORDERS[order](loss, custom_vjp=rule), jax.grad(loss, (0, 1))
    total = dots(plain, x, w)[F32]
    found = dots(made, x, w)
    assert found.total() == total == 6
    if entered:
        assert found == {BF16: 6}
    elif order == "grad(autocast)":
        assert found == {BF16: 3, F32: 3}
    else:
        # The gradient has been taken before: what is left of the rule is plain code.
        assert found == {BF16: 6}
    assert signature(made, x, w) == signature(plain, x, w)
    if rule in ("opaque", "enter"):
        assert distance(jax.jit(made)(x, w), jax.jit(plain)(x, w)) < CLOSE


@pytest.mark.parametrize("rule", ["opaque", "enter"])
def test_a_forward_pass_alone(rule: Any) -> None:
    x, w = arrays((2, 3), (3, 3))
    made = autocast(lambda x, w: kernel(x @ w, w), custom_vjp=rule)
    assert dots(made, x, w) == ({BF16: 2} if rule == "enter" else {BF16: 1, F32: 1})
    assert distance(jax.jit(made)(x, w), jax.jit(lambda x, w: kernel(x @ w, w))(x, w)) < CLOSE
    # Its own results keep their traced dtype, entered or not.
    assert jax.eval_shape(autocast(kernel, custom_vjp=rule, outputs="flow"), x, w).dtype == jnp.float32


@partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def powered(fn: Fn, x: jax.Array, times: int, ids: jax.Array) -> jax.Array:
    return fn(x @ x)[ids] * times


def _powered_forward(fn: Fn, x: jax.Array, times: int, ids: jax.Array) -> tuple[jax.Array, Any]:
    return fn(x @ x)[ids] * times, (x, ids)


def _powered_backward(fn: Fn, times: int, kept: Any, ct: jax.Array) -> tuple[jax.Array, np.ndarray]:
    x, ids = kept
    dx = jnp.zeros_like(x).at[ids].add(ct) @ x.T
    return dx * times, np.zeros(ids.shape, jax.dtypes.float0)


powered.defvjp(_powered_forward, _powered_backward)


@pytest.mark.parametrize("rule", ["opaque", "enter"])
@pytest.mark.parametrize("order", ORDERS)
def test_static_arguments_and_float0_gradients(order: str, rule: str) -> None:
    def picked(x: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(powered(jnp.tanh, x @ w, 3, ids) ** 2)

    x, w = arrays((3, 3), (3, 3))
    ids = jnp.array([0, 2, 2])
    made, plain = ORDERS[order](picked, custom_vjp=rule), jax.grad(picked, (0, 1))
    found = dots(made, x, w, ids)
    assert found[BF16] >= 3
    assert found.total() == dots(plain, x, w, ids)[F32]
    assert (F32 in found) == (rule == "opaque" and order == "grad(autocast)")
    assert signature(made, x, w, ids) == signature(plain, x, w, ids)
    if order == "grad(autocast)":
        assert distance(jax.jit(made)(x, w, ids), jax.jit(plain)(x, w, ids)) < CLOSE


@pytest.mark.parametrize("rule", ["opaque", "enter"])
@pytest.mark.parametrize("order", ORDERS)
def test_rules_under_vmap_remat_and_scan(order: str, rule: str) -> None:
    def scanned(w: jax.Array, xs: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda h: kernel(h, w))

        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jax.vmap(layer)(h[:, None])[:, 0] + x @ w, None

        return jnp.sum(lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[0])

    w, xs = arrays((3, 3), (2, 4, 3))
    made, plain = ORDERS[order](scanned, custom_vjp=rule), jax.grad(scanned, (0, 1))
    found = dots(made, w, xs)
    assert found.total() == dots(plain, w, xs)[F32]
    assert found[BF16] >= 3
    assert (F32 in found) == (rule == "opaque" and order == "grad(autocast)")
    if order == "grad(autocast)":
        assert distance(jax.jit(made)(w, xs), jax.jit(plain)(w, xs)) < 2 * CLOSE


@jax.custom_vjp
def straight_through(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.round(x), ids + 1


straight_through.defvjp(
    lambda x, ids: ((jnp.round(x), ids + 1), None),
    lambda _kept, cts: (jnp.clip(cts[0], -1.0, 1.0), None),
)


@pytest.mark.parametrize("rule", ["opaque", "enter"])
def test_none_as_residual_and_as_gradient(rule: str) -> None:
    def rounded(x: jax.Array, w: jax.Array) -> jax.Array:
        y, ids = straight_through(4.0 * x @ w, jnp.arange(3))
        return jnp.sum(y * ids)

    x, w = arrays((3, 3), (3, 3))
    for order in ORDERS:
        made, plain = ORDERS[order](rounded, custom_vjp=rule), jax.grad(rounded, (0, 1))
        assert set(dots(made, x, w)) == {BF16}
        assert signature(made, x, w) == signature(plain, x, w)
    assert distance(jax.jit(made)(x, w), jax.jit(plain)(x, w)) < CLOSE


@pytest.mark.parametrize("rule", ["opaque", "enter"])
def test_an_optimized_remat_rule(rule: str) -> None:
    x, w = arrays((2, 3), (3, 3))
    tuned = jax.custom_vjp(lambda x, w: jnp.sin(x @ w))
    tuned.defvjp(_forward, _backward, optimize_remat=True)

    def through(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jax.checkpoint(tuned)(x @ w, w) ** 2)

    made, plain = jax.grad(autocast(through, custom_vjp=rule), (0, 1)), jax.grad(through, (0, 1))
    assert dots(made, x, w)[BF16] >= 3
    assert distance(jax.jit(made)(x, w), jax.jit(plain)(x, w)) < CLOSE


@pytest.mark.parametrize("rule", ["opaque", "enter"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_rule_that_asks_which_arguments_matter(order: str, rule: str) -> None:
    asked: list[tuple[bool, bool]] = []

    @jax.custom_vjp
    def picky(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def forward(x: Any, w: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        asked.append((x.perturbed, w.perturbed))
        return x.value @ w.value, (x.value, w.value)

    picky.defvjp(forward, lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct), symbolic_zeros=True)
    x, w = arrays((2, 3), (3, 3))

    def only_x(x: jax.Array) -> jax.Array:
        return jnp.sum(picky(x @ w, w) ** 2)

    made = jax.grad(autocast(only_x, custom_vjp=rule)) if order == "grad(autocast)" else autocast(jax.grad(only_x))
    assert dots(made, x)[BF16] >= 2
    assert set(asked) == {(True, False)}
    assert signature(made, x) == signature(jax.grad(only_x), x)


def test_autocast_within_a_rule_of_ones_own() -> None:
    @jax.custom_vjp
    def own(x: jax.Array, w: jax.Array) -> jax.Array:
        return autocast(_forward)(x, w)[0]

    own.defvjp(autocast(_forward), autocast(_backward))
    x, w = arrays((2, 3), (3, 3))
    made = jax.grad(lambda x, w: jnp.sum(own(x, w)), (0, 1))
    assert dots(made, x, w) == {BF16: 3}
    want = jax.grad(lambda x, w: jnp.sum(kernel(x, w)), (0, 1))(x, w)
    assert distance(jax.jit(made)(x, w), want) < CLOSE
