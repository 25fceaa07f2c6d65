"""Training in float16 with the scaler ends where float32 ends; what float16 alone cannot train it trains."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mezzo import ScaleState
from mezzo.jax import autocast
from mezzo.jax.optax_wrappers import loss_scaled
from mezzo.jax.scaler import GradScaler
from mezzo.jax.stepping import apply_if

STEPS = 300
GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((256, 8)).astype(np.float32)
# With noise, so that the loss ends well above what the roundings of float16 add to it.
Y = (np.sin(X[:, :3]).sum(axis=1, keepdims=True) + 0.2 * GENERATOR.standard_normal((256, 1))).astype(np.float32)


def parameters() -> list[tuple[Any, Any]]:
    generator = np.random.default_rng(1)
    sizes = [8, 32, 32, 1]
    return [
        (jnp.float32(generator.standard_normal((a, b)) / np.sqrt(a)), jnp.zeros(b))
        for a, b in itertools.pairwise(sizes)
    ]


def mlp_loss(params: Any, factor: Any) -> Any:
    """Give the mean squared error, times a factor that makes gradients small."""
    x = jnp.asarray(X)
    for weight, bias in params[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = params[-1]
    return jnp.square(x @ weight + bias - Y).mean() * factor


low_loss = autocast(mlp_loss, "float16")
# An eps far below gradients of 1e-9, so that Adam's steps do not depend on the size of the loss.
ADAM = optax.adam(3e-3, eps=1e-20)
SCALER = GradScaler.create()


def run(step: Any, carry: Any, factor: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (step(carry, factor), None), carry, None, length=STEPS)[0]


@functools.partial(jax.jit, static_argnums=0)
def by_hand(loss_fn: Any, scaler: GradScaler, factor: Any) -> tuple[Any, GradScaler]:
    """Train by `value_and_grad`, `apply_if` and `update`; give the last loss in float32 and without the factor."""

    def step(carry: Any, factor: Any) -> Any:
        params, opt_state, scaler = carry
        _, grads, check = scaler.value_and_grad(loss_fn)(params, factor)

        def update(params: Any, opt_state: Any) -> Any:
            updates, opt_state = ADAM.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = apply_if(check, update, params, opt_state)
        return params, opt_state, scaler.update(check)

    params, _, scaler = run(step, (parameters(), ADAM.init(parameters()), scaler), factor)
    return mlp_loss(params, 1.0), scaler


def at_scale(scale: float) -> GradScaler:
    return SCALER.with_state(ScaleState(scale))


@pytest.fixture(scope="module")
def full() -> float:
    loss, _ = by_hand(mlp_loss, GradScaler.create(enabled=False), 1.0)
    assert float(loss) < 0.1 * float(mlp_loss(parameters(), 1.0))
    return float(loss)


# Each of these begins a little too high, so that a step or two have to be skipped; one costs the end some per mille.


def test_float16_with_the_scaler_ends_within_three_percent_of_float32(full: float) -> None:
    loss, scaler = by_hand(low_loss, at_scale(2.0**18), 1.0)
    assert 0 < int(scaler.skipped) < 4
    assert float(loss) == pytest.approx(full, rel=0.03)


def test_gradients_below_float16_train_with_the_scaler_only(full: float) -> None:
    without, _ = by_hand(low_loss, at_scale(1.0), 1e-6)
    assert float(without) > 10 * full
    loss, scaler = by_hand(low_loss, at_scale(2.0**37), 1e-6)
    assert 0 < int(scaler.skipped) < 4
    assert float(loss) == pytest.approx(full, rel=0.03)


def test_inside_of_optax_it_ends_there_too(full: float) -> None:
    tx = loss_scaled(ADAM, at_scale(2.0**18))

    def step(carry: Any, factor: Any) -> Any:
        params, opt_state = carry
        grads = jax.grad(lambda params: opt_state.scaler.scale_loss(low_loss(params, factor)))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = jax.jit(lambda: run(step, (parameters(), tx.init(parameters())), 1.0))()
    assert 0 < int(opt_state.scaler.skipped) < 4
    assert float(mlp_loss(params, 1.0)) == pytest.approx(full, rel=0.03)


def test_the_scaler_computes_in_float32_wherever_autocast_is() -> None:
    """Gradients of 1e-9 come out right also where autocast rewrites the scaler's own equations."""

    @jax.jit
    def gradients(params: Any) -> Any:
        scaler = at_scale(2.0**30)
        outside = autocast(scaler.value_and_grad(mlp_loss), "float16")(params, 1e-6)
        return outside, scaler.value_and_grad(low_loss)(params, 1e-6), jax.value_and_grad(mlp_loss)(params, 1e-6)

    outside, inside, (exact, expected) = gradients(parameters())
    for value, grads, check in (outside, inside):
        assert bool(check.finite)
        assert float(value) == pytest.approx(float(exact), rel=0.01)
        for found, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
            assert found.dtype == jnp.float32
            # Ten bits of float16 and three layers: some per mille of the largest element.
            np.testing.assert_allclose(found, wanted, atol=0.01 * float(jnp.abs(wanted).max()), rtol=0.0)
