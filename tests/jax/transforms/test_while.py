"""Autocast of while loops: off by default, in the body on request, never in the condition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mezzo.jax import autocast

from .seen import BF16, F32, arrays, distance, dots, equations, signature


def richardson(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Solve ``a x = b`` to a residual of 1e-4, or give up after 300 steps."""

    def unfinished(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, steps = state
        return (jnp.linalg.norm(b - a @ x) > 1e-4) & (steps < 300)

    def improve(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, steps = state
        return x + 0.5 * (b - a @ x), steps + 1

    return lax.while_loop(unfinished, improve, (jnp.zeros_like(b), 0))


def system() -> tuple[jax.Array, jax.Array]:
    noise, b = arrays((6, 6), (6,))
    return jnp.eye(6) + 0.05 * (noise + noise.T), b


def test_a_solver_takes_the_same_steps_and_finds_the_same_solution() -> None:
    a, b = system()
    made = autocast(lambda a, b: richardson(a, b @ a))
    got, want = jax.jit(made)(a, b), jax.jit(lambda a, b: richardson(a, b @ a))(a, b)
    assert int(got[1]) == int(want[1]) < 100
    # The right-hand side was rounded to 8 bits; the solution is that of the rounded one.
    assert distance(got[0], want[0]) < 2e-2
    found = dots(made, a, b)
    assert found == {BF16: 1, F32: 2}


def test_a_body_in_low_precision_on_request_does_not_converge() -> None:
    a, b = system()
    made = autocast(richardson, while_="body")
    (loop,) = [eqn for eqn in equations(made, a, b) if eqn.primitive.name == "while"]
    body, cond = loop.params["body_jaxpr"], loop.params["cond_jaxpr"]
    assert dots(jax.extend.core.jaxpr_as_fun(body), *body.in_avals) == {BF16: 1}
    assert dots(jax.extend.core.jaxpr_as_fun(cond), *cond.in_avals) == {F32: 1}
    assert signature(made, a, b) == signature(richardson, a, b)
    # That is what the default protects from: 8 bits of `a @ x` never reach 1e-4.
    assert int(jax.jit(made)(a, b)[1]) == 300


@pytest.mark.parametrize("carry", ["pin", "fixpoint"])
def test_a_decoding_loop_may_be_entered(carry: str) -> None:
    def decode(w: jax.Array, h: jax.Array, steps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            h, i, ids = state
            h = jnp.tanh(h @ w)
            return h, i + 1, ids.at[i].set(jnp.argmax(h))

        return lax.while_loop(lambda s: s[1] < steps, step, (h, jnp.int32(0), jnp.zeros(4, jnp.int32)))

    w, h = arrays((3, 3), (3,))
    args = (w, h, jnp.int32(3))
    assert dots(autocast(decode), *args) == {F32: 1}
    made = autocast(decode, while_="body", carry=carry)
    assert dots(made, *args) == {BF16: 1}
    assert signature(made, *args) == signature(decode, *args)
    got, want = jax.jit(made)(*args), jax.jit(decode)(*args)
    assert got[1] == 3
    assert distance(got[0], want[0]) < 3e-2


def test_a_while_loop_within_a_scan_stays_off_and_the_scan_is_low() -> None:
    def both(w: jax.Array, xs: jax.Array) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            h = jnp.tanh(x @ w)
            return lax.while_loop(lambda h: jnp.sum(h) > 1e-3, lambda h: h @ w * 0.1, h), None

        return lax.scan(step, jnp.zeros(3), xs)[0]

    w, xs = arrays((3, 3), (2, 3))
    assert dots(autocast(both), w, xs) == {BF16: 1, F32: 1}
    assert dots(autocast(both, while_="body"), w, xs) == {BF16: 2}


def test_low_constants_of_a_loop_come_at_their_traced_dtype() -> None:
    def loop(x: jax.Array) -> jax.Array:
        matrix = x @ x
        return lax.while_loop(lambda h: jnp.sum(h * matrix) < 10.0, lambda h: h + jnp.abs(matrix), jnp.zeros((3, 3)))

    (x,) = arrays((3, 3))
    assert dots(autocast(loop), x) == {BF16: 1}
    (found,) = [eqn for eqn in equations(autocast(loop), x) if eqn.primitive.name == "while"]
    assert {var.aval.dtype.name for var in found.invars if var.aval.dtype != bool} == {"float32"}
    assert distance(jax.jit(autocast(loop))(x), jax.jit(loop)(x)) < 3e-2
