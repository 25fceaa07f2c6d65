"""Solvers inside a net converge as in float32, in as many iterations, while the net around them runs low.

A solver in the low dtype would not: its steps get as small as a rounding and stay there. One test lets the bodies of `while`
run low, and sees the same loops fail.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint
from jax.scipy.sparse.linalg import cg

from mezzo.jax import autocast

from .nets import LOW_DTYPES, Draw, check_close, dots, relative_error, run, unit

SIZE, CAP = 6, 400


def spd() -> jax.Array:
    """A symmetric positive definite matrix with eigenvalues from 1 to 3."""
    directions, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, SIZE)))
    return jnp.asarray(directions @ np.diag(np.linspace(1.0, 3.0, SIZE)) @ directions.T, jnp.float32)


def richardson(matrix: jax.Array, b: jax.Array, tolerance: float) -> tuple[jax.Array, jax.Array]:
    def proceed(state: Any) -> jax.Array:
        x, steps = state
        return (jnp.max(jnp.abs(b - matrix @ x)) > tolerance) & (steps < CAP)

    def body(state: Any) -> Any:
        x, steps = state
        return x + 0.4 * (b - matrix @ x), steps + 1

    return lax.while_loop(proceed, body, (jnp.zeros_like(b), 0))


def cubic(matrix: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    return matrix @ x + x**3 - b


def newton(matrix: jax.Array, b: jax.Array, tolerance: float) -> tuple[jax.Array, jax.Array]:
    def proceed(state: Any) -> jax.Array:
        x, steps = state
        return (jnp.max(jnp.abs(cubic(matrix, b, x))) > tolerance) & (steps < CAP)

    def body(state: Any) -> Any:
        x, steps = state
        slope = jax.jacfwd(lambda x: cubic(matrix, b, x))(x)
        return x - jnp.linalg.inv(slope) @ cubic(matrix, b, x), steps + 1

    return lax.while_loop(proceed, body, (jnp.zeros_like(b), 0))


SOLVERS = {"Richardson": (richardson, 1e-5), "Newton": (newton, 2e-6)}


def net_and_solver(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A product that runs low makes the right-hand side, which is given out to solve for it anew."""
    solve, tolerance = SOLVERS[name]

    def net(weights: jax.Array, x: jax.Array) -> Any:
        b = jnp.tanh(x @ weights)
        return b, *solve(spd(), b, tolerance)

    draw = Draw()
    return net, (draw(SIZE, SIZE), draw(SIZE, scale=1.0))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("name", SOLVERS)
def test_a_loop_to_a_tolerance_takes_the_steps_of_float32_and_reaches_it(name: str, dtype: str) -> None:
    net, args = net_and_solver(name)
    (b, x, steps), jaxpr = run(autocast(net, dtype), *args)
    assert dots(jaxpr)[(dtype,) * 3] == 1
    solve, tolerance = SOLVERS[name]
    (want, want_steps), _ = run(lambda b: solve(spd(), b, tolerance), b)
    assert int(steps) == int(want_steps) < CAP
    assert x.dtype == jnp.float32
    assert relative_error(x, want) < 1e-5


@pytest.mark.parametrize("name", SOLVERS)
def test_with_bodies_of_while_running_low_the_same_loop_hits_its_cap(name: str) -> None:
    net, args = net_and_solver(name)
    (_, _, steps), _ = run(autocast(net, "bfloat16", while_="body"), *args)
    assert int(steps) == CAP


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_conjugate_gradients_reach_the_residual_of_float32_in_as_many_iterations(dtype: str) -> None:
    def loss(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        b = jnp.tanh(x @ weights)
        # As many iterations as there are unknowns: enough where the arithmetic is float32's.
        solution, _ = cg(lambda v: spd() @ v, b, tol=1e-6, maxiter=SIZE)
        return jnp.sum(solution**2), (b, solution)

    args = (Draw()(SIZE, SIZE), Draw(1)(SIZE, scale=1.0))
    want, plain = run(jax.value_and_grad(loss, has_aux=True), *args)
    ((value, (b, solution)), gradient), jaxpr = run(jax.value_and_grad(autocast(loss, dtype), has_aux=True), *args)
    assert dots(jaxpr)[(dtype,) * 3] == 2  # x @ weights and its transpose
    assert dots(jaxpr).total() == dots(plain).total()
    assert float(jnp.linalg.norm(spd() @ solution - b)) < 3e-6 * float(jnp.linalg.norm(b))
    check_close((value, gradient), (want[0][0], want[1]), 4 * unit(dtype))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_custom_root_finds_the_root_of_float32_and_its_derivative(dtype: str) -> None:
    def loss(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        b = jnp.tanh(x @ weights)
        root = lax.custom_root(
            lambda y: cubic(spd(), b, y),
            jnp.zeros_like(b),
            newton_of,
            lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y),
        )
        return jnp.sum(root**2), (b, root)

    args = (Draw()(SIZE, SIZE), Draw(1)(SIZE, scale=1.0))
    want, _ = run(jax.value_and_grad(loss, has_aux=True), *args)
    ((value, (b, root)), gradient), jaxpr = run(jax.value_and_grad(autocast(loss, dtype), has_aux=True), *args)
    assert dots(jaxpr)[(dtype,) * 3] >= 2
    assert float(jnp.max(jnp.abs(cubic(spd(), b, root)))) < 3e-6
    check_close((value, gradient), (want[0][0], want[1]), 4 * unit(dtype))


def newton_of(f: Any, start: jax.Array) -> jax.Array:
    def body(state: Any) -> Any:
        x, steps = state
        return x - jnp.linalg.solve(jax.jacfwd(f)(x), f(x)), steps + 1

    return lax.while_loop(lambda s: (jnp.max(jnp.abs(f(s[0]))) > 2e-6) & (s[1] < CAP), body, (start, 0))[0]


TIMES = jnp.linspace(0.0, 2.0, 4)


def slope(y: jax.Array, t: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.tanh(matrix @ y) - 0.5 * y * jnp.cos(t)


def with_odeint(start: jax.Array, matrix: jax.Array, counted: Any = slope) -> jax.Array:
    return odeint(counted, start, TIMES, matrix, rtol=1e-5, atol=1e-6)[-1]


def with_fixed_steps(start: jax.Array, matrix: jax.Array) -> jax.Array:
    """The classical Runge-Kutta method with 80 steps: as good as float32 gets, and simple enough to trust."""
    h = TIMES[-1] / 80

    def step(y: jax.Array, t: jax.Array) -> tuple[jax.Array, None]:
        k1 = slope(y, t, matrix)
        k2 = slope(y + h / 2 * k1, t + h / 2, matrix)
        k3 = slope(y + h / 2 * k2, t + h / 2, matrix)
        return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(y + h * k3, t + h, matrix)), None

    return lax.scan(step, start, h * jnp.arange(80))[0]


def test_odeint_takes_the_steps_of_float32() -> None:
    dtype, calls = "bfloat16", list[int]()

    def counted(y: jax.Array, t: jax.Array, matrix: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return slope(y, t, matrix)

    def net(weights: jax.Array, x: jax.Array, matrix: jax.Array) -> Any:
        start = jnp.tanh(x @ weights)
        return start, with_odeint(start, matrix, counted)

    draw = Draw()
    weights, x, matrix = draw(SIZE, SIZE), draw(SIZE, scale=1.0), draw(SIZE, SIZE)
    (start, end), jaxpr = run(autocast(net, dtype), weights, x, matrix)
    jax.effects_barrier()
    steps = len(calls)
    calls.clear()
    want, _ = run(lambda start, matrix: with_odeint(start, matrix, counted), start, matrix)
    jax.effects_barrier()
    assert dots(jaxpr)[(dtype,) * 3] == 1
    assert steps == len(calls) > 20
    assert relative_error(end, want) < 1e-5  # the tolerance which odeint was given


def test_the_adjoint_of_odeint_agrees_with_float32() -> None:
    def loss_of(solve: Any) -> Any:
        return lambda weights, x: jnp.mean(solve(jnp.tanh(x @ weights["in"]), weights["matrix"]) ** 2)

    draw = Draw()
    args = ({"in": draw(SIZE, SIZE), "matrix": draw(SIZE, SIZE)}, draw(SIZE, scale=1.0))
    want, _ = run(jax.value_and_grad(loss_of(with_fixed_steps)), *args)
    got, jaxpr = run(jax.value_and_grad(autocast(loss_of(with_odeint))), *args)
    assert dots(jaxpr)[("bfloat16",) * 3] == 2
    check_close(got, want, 4 * unit("bfloat16"))
