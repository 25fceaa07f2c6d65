"""Autocast of functions with a forward rule of their own: the rule stays, primal and rule are rewritten."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mezzo.jax import autocast

from .seen import BF16, F32, arrays, distance, dots, equations, of, signature

Fn = Callable[..., Any]

CLOSE = 2e-2


@jax.custom_jvp
def clipped(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product whose tangent is, unlike the true one, doubled."""
    return jnp.maximum(x @ w, 0.0)


@clipped.defjvp
def _clipped_rule(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    (x, w), (dx, dw) = primals, tangents
    return clipped(x, w), 2.0 * (dx @ w + x @ dw)


ORDERS: dict[str, Fn] = {
    "grad(autocast)": lambda f, argnums: jax.grad(autocast(f), argnums),
    "autocast(grad)": lambda f, argnums: autocast(jax.grad(f, argnums)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_rule_is_used_and_its_dots_are_low(order: str) -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(clipped(x, w) * w)

    x, w = arrays((3, 3), (3, 3))
    made, plain = ORDERS[order](loss, (0, 1)), jax.grad(loss, (0, 1))
    assert dots(made, x, w) == {BF16: dots(plain, x, w)[F32]}
    assert signature(made, x, w) == signature(plain, x, w)
    assert distance(jax.jit(made)(x, w), jax.jit(plain)(x, w)) < CLOSE


def test_a_forward_pass_keeps_the_function_as_one() -> None:
    x, w = arrays((3, 3), (3, 3))
    assert [eqn.primitive.name for eqn in equations(autocast(clipped), x, w)].count("custom_jvp_call") == 1
    assert dots(autocast(clipped), x, w) == {BF16: 1}
    # Nothing in it needs float32: not the zero, and not the product.
    assert of("max", autocast(clipped), x, w) == [BF16]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "logaddexp", "softplus", "leaky_relu", "elu", "log_softmax"])
def test_activations_of_jax_have_the_right_gradients(name: str, order: str) -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        y = jnp.logaddexp(y, 2.0 * y) if name == "logaddexp" else getattr(jax.nn, name)(y)
        return jnp.sum(y * jnp.arange(3.0))

    x, w = arrays((4, 3), (3, 3))
    made, plain = ORDERS[order](loss, 1), jax.grad(loss, 1)
    assert set(dots(made, x, w)) == {BF16}
    assert signature(made, x, w) == signature(plain, x, w)
    if order == "grad(autocast)" and name in ("relu", "gelu", "logaddexp", "log_softmax"):
        assert distance(jax.jit(made)(x, w), jax.jit(plain)(x, w)) < 2 * CLOSE


def test_relu_of_a_low_activation_stays_low() -> None:
    x, w = arrays((4, 3), (3, 3))
    made = autocast(lambda x, w: jax.nn.relu(x @ w), outputs="flow")
    assert jax.eval_shape(made, x, w).dtype == jnp.bfloat16
    assert of("max", made, x, w) == [BF16]


@jax.custom_jvp
def scaled(x: jax.Array, times: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x * times, times + 1


@scaled.defjvp
def _scaled_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    import numpy as np

    (x, times), (dx, _) = primals, tangents
    return scaled(x, times), (dx * times, np.zeros((), jax.dtypes.float0))


@pytest.mark.parametrize("order", ORDERS)
def test_integer_arguments_and_results_of_a_rule(order: str) -> None:
    def loss(x: jax.Array, times: jax.Array) -> jax.Array:
        y, more = scaled(x @ x, times)
        return jnp.sum(y * more)

    (x,) = arrays((3, 3))
    made, plain = ORDERS[order](loss, 0), jax.grad(loss)
    assert set(dots(made, x, jnp.int32(3))) == {BF16}
    assert distance(jax.jit(made)(x, jnp.int32(3)), jax.jit(plain)(x, jnp.int32(3))) < CLOSE


@partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def applied(fn: Fn, x: jax.Array, times: int) -> jax.Array:
    return fn(x @ x) * times


@applied.defjvp
def _applied_rule(fn: Fn, times: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    return applied(fn, x, times), (x @ dx) * times * 5.0


@pytest.mark.parametrize("order", ORDERS)
def test_functions_and_numbers_that_are_not_differentiated(order: str) -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(applied(jnp.tanh, x, 3))

    (x,) = arrays((3, 3))
    made, plain = ORDERS[order](loss, 0), jax.grad(loss)
    assert set(dots(made, x)) == {BF16}
    assert distance(jax.jit(made)(x), jax.jit(plain)(x)) < CLOSE


@jax.custom_jvp
def product(x: jax.Array, y: jax.Array) -> jax.Array:
    return x @ y


def _product_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    from jax.custom_derivatives import SymbolicZero

    (x, y), (dx, dy) = primals, tangents
    out = product(x, y)
    terms = [None if type(dx) is SymbolicZero else dx @ y, None if type(dy) is SymbolicZero else x @ dy]
    known = [term for term in terms if term is not None]
    return out, sum(known[1:], known[0])


product.defjvp(_product_rule, symbolic_zeros=True)


def test_symbolic_zeros_reach_the_rule() -> None:
    x, y = arrays((3, 3), (3, 3))
    for order in ORDERS:
        made = ORDERS[order](lambda x, y: jnp.sum(product(x, y) * y @ y), 0)
        plain = jax.grad(lambda x, y: jnp.sum(product(x, y) * y @ y))
        assert dots(made, x, y)[BF16] >= 1
        assert signature(made, x, y) == signature(plain, x, y)
        assert distance(jax.jit(made)(x, y), jax.jit(plain)(x, y)) < CLOSE


def test_rules_under_vmap_remat_and_scan() -> None:
    from jax import lax

    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda h: clipped(h, w) + jax.nn.softplus(h))

        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jax.vmap(layer)(h) + x, None

        return jnp.sum(lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[0])

    w, xs = arrays((3, 3), (2, 4, 3))
    for made in (jax.grad(autocast(loss)), autocast(jax.grad(loss))):
        assert dots(made, w, xs) == {BF16: dots(jax.grad(loss), w, xs)[F32]}
        assert distance(jax.jit(made)(w, xs), jax.jit(jax.grad(loss))(w, xs)) < 2 * CLOSE
