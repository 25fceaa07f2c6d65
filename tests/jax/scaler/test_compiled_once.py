"""A whole run is one compilation, under the transformations of JAX, with donated buffers and after a checkpoint."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mezzo import LossScaling, ScaleState, Verdict
from mezzo.jax.scaler import GradScaler
from mezzo.jax.stepping import apply_if

Step = Any


def make_step() -> tuple[Step, list[int]]:
    """Make a training step of a weight, and a list that grows by one for each time it is traced."""
    traces: list[int] = []

    def step(weight: Any, scaler: GradScaler, factor: Any) -> Any:
        traces.append(1)
        _, grads, check = scaler.value_and_grad(lambda w: (w * factor).sum())(weight)
        weight = apply_if(check, lambda weight: weight - 0.01 * grads, weight)
        return weight, scaler.update(check)

    return step, traces


def expected_after(numbers: LossScaling, factors: np.ndarray[Any, Any]) -> ScaleState:
    state = numbers.start()
    for factor in factors:
        verdict = Verdict.INF if np.isinf(factor) else Verdict.NAN if np.isnan(factor) else Verdict.FINITE
        state = numbers.next(state, verdict)
    return state


NUMBERS = LossScaling(init_scale=2.0**10, growth_factor=1.5, backoff_factor=0.7, growth_interval=50, max_scale=2.0**12)
FACTORS = np.ones(2000, np.float32)
FACTORS[[3, 4, 90, 1111]] = np.inf
FACTORS[[7, 8, 1500]] = np.nan


@pytest.mark.parametrize("donate", [False, True])
def test_two_thousand_steps_and_a_reload_are_one_compilation(donate: bool) -> None:
    step, traces = make_step()
    compiled = jax.jit(step, donate_argnums=(0, 1) if donate else ())
    weight, scaler = jnp.ones(3), GradScaler.create(NUMBERS)
    for index, factor in enumerate(FACTORS):
        weight, scaler = compiled(weight, scaler, factor)
        if index == 700:
            scaler = pickle.loads(pickle.dumps(scaler))
        if index == 1400:
            scaler = GradScaler.create(NUMBERS).with_state(scaler.state())
    assert len(traces) == 1
    assert scaler.state() == expected_after(NUMBERS, FACTORS)
    assert int(scaler.skipped) == 1  # of those after step 1400: the counter is no part of the state


def test_a_scan_carries_the_scaler() -> None:
    step, traces = make_step()

    @jax.jit
    def run(weight: Any, scaler: GradScaler, factors: Any) -> Any:
        def body(carry: Any, factor: Any) -> Any:
            return step(*carry, factor), carry[1].scale

        return jax.lax.scan(body, (weight, scaler), factors)

    (weight, scaler), scales = run(jnp.ones(3), GradScaler.create(NUMBERS), jnp.asarray(FACTORS))
    assert len(traces) == 1
    assert scaler.state() == expected_after(NUMBERS, FACTORS)
    assert int(scaler.skipped) == 7
    assert float(scales[0]) == NUMBERS.init_scale
    # 1993 steps of 0.01, each added in float32: the roundings of 2000 sums near 20 are less than 1e-2 together.
    np.testing.assert_allclose(weight, 1 - 0.01 * 1993, atol=1e-2)


def test_vmapped_members_each_have_a_scale_of_their_own() -> None:
    step, traces = make_step()
    scalers = jax.vmap(lambda _: GradScaler.create(NUMBERS))(jnp.arange(3))
    weights = jnp.ones((3, 2))
    factors = jnp.array([1.0, jnp.inf, jnp.nan])
    run = jax.jit(jax.vmap(step))
    for _ in range(2):
        weights, scalers = run(weights, scalers, factors)
    assert len(traces) == 1
    alone = [expected_after(NUMBERS, np.array([factor, factor])) for factor in factors]
    np.testing.assert_array_equal(scalers.scale, np.float32([state.scale for state in alone]))
    np.testing.assert_array_equal(scalers.nan_backoffs, [0, 0, 2])
    np.testing.assert_array_equal(weights[1:], np.ones((2, 2)))
    assert bool((weights[0] < 1).all())


def test_a_scaler_made_inside_of_jit_is_the_same() -> None:
    inside = jax.jit(lambda: GradScaler.create(NUMBERS).update(False))()
    assert inside.state() == GradScaler.create(NUMBERS).update(False).state()
    assert inside.scaling is NUMBERS or inside.scaling == NUMBERS


def test_no_two_leaves_share_a_buffer() -> None:
    """Or a scaler could not be donated."""
    for scaler in (GradScaler.create(), GradScaler.create().with_state(ScaleState(4.0, 1, 1))):
        leaves = jax.tree.leaves(scaler)
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves) == 4
