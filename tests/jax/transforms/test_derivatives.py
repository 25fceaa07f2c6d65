"""Autocast with JAX's derivatives, around it and inside of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mezzo.jax import autocast

from .seen import BF16, F16, F32, arrays, distance, dots, of, signature

Fn = Callable[..., Any]

# Each value passes a handful of roundings to 8 bits (2**-9 each), which add up to about one per cent.
CLOSE = 3e-2


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"]) ** 2)


def inputs() -> tuple[dict[str, jax.Array], jax.Array]:
    w, b, v, x = arrays((4, 8), (8,), (8, 2), (5, 4))
    return {"w": w, "b": b, "v": v}, x


GRADIENTS: dict[str, Fn] = {
    "grad(autocast)": lambda f, cast: jax.grad(cast(f)),
    "autocast(grad)": lambda f, cast: cast(jax.grad(f)),
    "jit(grad(autocast))": lambda f, cast: jax.jit(jax.grad(cast(f))),
    "autocast(jit(grad))": lambda f, cast: cast(jax.jit(jax.grad(f))),
    "grad(autocast(jit))": lambda f, cast: jax.grad(cast(jax.jit(f))),
    "grad(jit(autocast))": lambda f, cast: jax.grad(jax.jit(cast(f))),
    "value_and_grad(autocast)": lambda f, cast: jax.value_and_grad(cast(f)),
    "autocast(value_and_grad)": lambda f, cast: cast(jax.value_and_grad(f)),
    "autocast(vjp)": lambda f, cast: cast(lambda p, x: jax.vjp(f, p, x)[1](jnp.float32(1))[0]),
    "vjp(autocast)": lambda f, cast: lambda p, x: jax.vjp(cast(f), p, x)[1](jnp.float32(1))[0],
    "jacrev(autocast)": lambda f, cast: jax.jacrev(cast(f)),
    "autocast(jacrev)": lambda f, cast: cast(jax.jacrev(f)),
}


# The others are the same programs in another guise; compiling takes most of the time here.
COMPILED = ("grad(autocast)", "autocast(grad)", "autocast(jit(grad))", "value_and_grad(autocast)", "jacrev(autocast)")


@pytest.mark.parametrize("order", GRADIENTS)
def test_a_gradient_has_low_dots_only_and_float32_results(order: str) -> None:
    params, x = inputs()
    made, plain = GRADIENTS[order](loss, autocast), GRADIENTS[order](loss, lambda f: f)
    found = dots(made, params, x)
    assert set(found) == {BF16}
    assert found.total() == dots(plain, params, x)[F32] >= 5
    assert signature(made, params, x) == signature(plain, params, x)
    if order in COMPILED:
        got, want = jax.jit(made)(params, x), wanted(params, x)
        assert distance(got if isinstance(got, tuple) else (want[0], got), want) < CLOSE


@cache
def _reference() -> Fn:
    return jax.jit(jax.value_and_grad(loss))


def wanted(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, Any]:
    return _reference()(params, x)


@pytest.mark.parametrize("order", ["grad(autocast)", "autocast(grad)"])
def test_a_float16_gradient_is_low_and_closer(order: str) -> None:
    params, x = inputs()
    made = GRADIENTS[order](loss, lambda f: autocast(f, dtype="float16"))
    assert set(dots(made, params, x)) == {F16}
    # Three more bits than bfloat16.
    assert distance(jax.jit(made)(params, x), wanted(params, x)[1]) < CLOSE / 8


CURVATURES: dict[str, Fn] = {
    "jacfwd(autocast)": lambda f, cast: jax.jacfwd(cast(f)),
    "autocast(jacfwd)": lambda f, cast: cast(jax.jacfwd(f)),
    "hessian(autocast)": lambda f, cast: jax.hessian(cast(f)),
    "autocast(hessian)": lambda f, cast: cast(jax.hessian(f)),
    "jacfwd(autocast(grad))": lambda f, cast: jax.jacfwd(cast(jax.grad(f))),
    "jvp(autocast)": lambda f, cast: lambda p, x: jax.jvp(cast(f), (p, x), (p, x)),
    "autocast(jvp)": lambda f, cast: cast(lambda p, x: jax.jvp(f, (p, x), (p, x))),
    "linearize(autocast)": lambda f, cast: lambda p, x: jax.linearize(cast(f), p, x)[1](p, x),
    "autocast(linearize)": lambda f, cast: cast(lambda p, x: jax.linearize(f, p, x)[1](p, x)),
    "linear_transpose(autocast)": lambda f, cast: (
        lambda p, x: jax.linear_transpose(cast(lambda w: x @ w), jax.ShapeDtypeStruct((4, 8), jnp.float32))(
            jnp.ones((5, 8))
        )
    ),
}


# One way to a Hessian and one to a JVP are enough to compile.
TRACED = ("hessian(autocast)", "jacfwd(autocast(grad))", "autocast(jacfwd)", "autocast(jvp)", "autocast(linearize)")


@pytest.mark.parametrize("order", CURVATURES)
def test_forward_mode_and_second_derivatives_have_low_dots_only(order: str) -> None:
    params, x = inputs()
    made, plain = CURVATURES[order](loss, autocast), CURVATURES[order](loss, lambda f: f)
    found = dots(made, params, x)
    assert set(found) == {BF16}
    assert signature(made, params, x) == signature(plain, params, x)
    if order not in TRACED:
        # Second derivatives differ by the roundings of two passes.
        assert distance(jax.jit(made)(params, x), jax.jit(plain)(params, x)) < 2 * CLOSE


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_a_gradient_of_a_gradient_is_low_and_right(order: str) -> None:
    def penalty(f: Fn) -> Fn:
        return lambda w, x: jnp.sum(jax.grad(lambda x: jnp.sum(f(w, x)))(x) ** 2)

    def net(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w.T

    w, x = arrays((4, 4), (3, 4))
    made = jax.grad(autocast(penalty(net))) if order == "outside" else jax.grad(penalty(autocast(net)))
    assert set(dots(made, w, x)) == {BF16}
    got, want = jax.jit(made)(w, x), jax.jit(jax.grad(penalty(net)))(w, x)
    assert got.dtype == jnp.float32
    assert distance(got, want) < 2 * CLOSE


def test_aux_results_pass_a_gradient_as_they_are() -> None:
    def with_aux(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        return loss(params, x), {"hidden": x @ params["w"], "rows": jnp.arange(x.shape[0])}

    params, x = inputs()
    made = jax.value_and_grad(autocast(with_aux), has_aux=True)
    assert signature(made, params, x) == signature(jax.value_and_grad(with_aux, has_aux=True), params, x)
    (_, aux), _ = jax.jit(made)(params, x)
    assert aux["rows"].tolist() == [0, 1, 2, 3, 4]
    # One rounding of two operands each, then of the sum.
    assert 0 < distance(aux["hidden"], x @ params["w"]) < 1e-2


def test_an_integer_argument_has_a_float0_gradient() -> None:
    def pick(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum((table @ table.T)[ids])

    (table,) = arrays((4, 4))
    made = jax.grad(autocast(pick), argnums=(0, 1), allow_int=True)
    grads = made(table, jnp.array([0, 2]))
    assert grads[0].dtype == jnp.float32
    assert grads[1].dtype == jax.dtypes.float0
    assert set(dots(jax.grad(autocast(pick)), table, jnp.array([0, 2]))) == {BF16}


def test_a_rewritten_backward_sums_cotangents_of_one_weight_in_float32() -> None:
    def reused(w: jax.Array, xs: list[jax.Array]) -> jax.Array:
        return jnp.sum(jnp.stack([jnp.sum(x @ w) for x in xs]))

    w, *xs = arrays((4, 4), *[(2, 4)] * 3)
    sums = of("add_any", autocast(jax.grad(reused)), w, xs)
    assert len(sums) == 2
    assert set(sums) == {F32}
    assert set(of("add_any", jax.grad(autocast(reused)), w, xs)) == {F32}


def test_every_row_of_per_example_gradients_is_that_examples_own() -> None:
    params, x = inputs()
    made = jax.jit(jax.vmap(jax.grad(autocast(loss)), in_axes=(None, 0)))
    outer = jax.jit(autocast(jax.vmap(jax.grad(loss), in_axes=(None, 0))))
    want = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(params, x[:, None])
    for fn in (made, outer):
        assert set(dots(fn, params, x[:, None])) == {BF16}
        assert distance(fn(params, x[:, None]), want) < CLOSE
