"""`loss_scaled`: an optax optimizer that unscales, checks, skips and moves the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mezzo.errors import OptionError, ScalingError
from mezzo.jax.master_weights import master_weights
from mezzo.jax.optax_wrappers import LossScaledState, loss_scaled
from mezzo.jax.scaler import GradScaler

PARAMS = {"w": jnp.array([0.5, -1.0]), "b": jnp.float32(0.25)}
GOOD, BAD = 1.0, jnp.inf

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def scaler(**numbers: Any) -> GradScaler:
    return GradScaler.create(**{"init_scale": 2.0**10, **numbers})


def scaled_grads(params: Any, opt_state: Any, factor: Any) -> Any:
    def scaled_loss(params: Any) -> Any:
        loss = factor * ((params["w"] * jnp.array([1.0, 2.0])).sum() + params["b"]) ** 2
        return optax.tree.get(opt_state, "scaler").scale_loss(loss)

    return jax.grad(scaled_loss)(params)


def stepper(tx: Any) -> Step:
    @jax.jit
    def step(params: Any, opt_state: Any, factor: Any) -> tuple[Any, Any]:
        updates, opt_state = tx.update(scaled_grads(params, opt_state, factor), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def plain_run(tx: Any, factors: list[Any]) -> tuple[Any, Any]:
    """Run the optimizer alone on the unscaled loss."""
    state = (PARAMS, tx.init(PARAMS), GradScaler.create(enabled=False))

    @jax.jit
    def step(params: Any, opt_state: Any, off: GradScaler, factor: Any) -> tuple[Any, Any]:
        grads = scaled_grads(params, LossScaledState(off, None, jnp.array(True)), factor)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state, off = state
    for factor in factors:
        params, opt_state = step(params, opt_state, off, factor)
    return params, opt_state


def run(tx: Any, factors: list[Any]) -> tuple[Any, Any]:
    step = stepper(tx)
    params, opt_state = PARAMS, tx.init(PARAMS)
    for factor in factors:
        params, opt_state = step(params, opt_state, factor)
    return params, opt_state


def assert_close(found: Any, expected: Any) -> None:
    """Compare two trees; two compiled programs may round a sum differently, by a few units of float32."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)


def clipped() -> Any:
    schedule = optax.exponential_decay(0.01, transition_steps=1, decay_rate=0.5)
    return optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(schedule, momentum=0.9))


def by_parts() -> Any:
    decay = optax.masked(optax.add_decayed_weights(0.1), {"w": True, "b": False})
    parts = optax.multi_transform({"fast": optax.adam(0.1), "none": optax.set_to_zero()}, {"w": "fast", "b": "none"})
    return optax.chain(decay, parts)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(0.01),
    "clipping and a schedule": clipped,
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 4)),
    "masked and by parts": by_parts,
}


@pytest.mark.parametrize(("name", "skip"), [*((name, "cond") for name in OPTIMIZERS), ("adam", "select")])
def test_skipped_steps_never_happened_for_the_optimizer(name: str, skip: Any) -> None:
    """Its whole state too: counts of schedules, moments, injected hyperparameters."""
    make = OPTIMIZERS[name]
    params, opt_state = run(loss_scaled(make(), scaler(), skip=skip), [BAD, GOOD, BAD, GOOD, GOOD, jnp.nan])
    expected, inner = plain_run(make(), [GOOD] * 3)
    assert_close(params, expected)
    assert_close(opt_state.inner_state, inner)
    assert float(opt_state.scaler.scale) == 2.0**7
    assert int(opt_state.scaler.skipped) == 3
    assert not opt_state.last_finite


def test_a_skipped_step_leaves_parameters_alone_to_the_bit() -> None:
    params, opt_state = run(loss_scaled(optax.adam(0.1), scaler()), [BAD])
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
    assert not opt_state.last_finite


def test_the_scaler_can_be_injected_around_too() -> None:
    def make(learning_rate: Any) -> Any:
        return loss_scaled(optax.adam(learning_rate), scaler())

    params, opt_state = run(optax.inject_hyperparams(make)(learning_rate=0.01), [GOOD, BAD, GOOD])
    assert_close(params, plain_run(optax.adam(0.01), [GOOD] * 2)[0])
    assert float(opt_state.inner_state.scaler.scale) == 2.0**9


def test_in_a_chain_the_scaler_is_found_in_the_state() -> None:
    tx = optax.chain(loss_scaled(optax.sgd(0.01), scaler()), optax.scale(1.0))
    params, opt_state = run(tx, [GOOD, BAD, GOOD])
    assert float(optax.tree.get(opt_state, "scaler").scale) == 2.0**9
    assert bool(jnp.isfinite(params["w"]).all())


# MultiSteps


def test_around_multi_steps_each_micro_batch_is_skipped_alone() -> None:
    tx = loss_scaled(optax.MultiSteps(optax.sgd(0.01), 2), scaler())
    params, opt_state = run(tx, [GOOD, BAD, BAD, GOOD])
    assert int(opt_state.inner_state.gradient_step) == 1
    assert_close(params, plain_run(optax.sgd(0.01), [GOOD])[0])
    assert float(opt_state.scaler.scale) == 2.0**8


def test_inside_of_multi_steps_an_inf_stays_in_what_optax_adds_up() -> None:
    """Why the documentation tells to put it inside: optax empties its sum by a product with 0."""
    tx = optax.MultiSteps(loss_scaled(optax.sgd(0.01), scaler()), 2)
    params, opt_state = run(tx, [GOOD, GOOD])
    assert_close(params, plain_run(optax.sgd(0.01), [GOOD])[0])
    params, opt_state = run(tx, [GOOD, BAD, GOOD, GOOD])
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
    assert bool(jnp.isnan(opt_state.acc_grads["w"]).all())


# Compilation, donation, mapped axes


def test_a_run_is_one_compilation_with_a_donated_state() -> None:
    tx, traces = loss_scaled(optax.adam(0.01), scaler(growth_interval=3)), []

    def step(params: Any, opt_state: Any, factor: Any) -> Any:
        traces.append(1)
        updates, opt_state = tx.update(scaled_grads(params, opt_state, factor), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    compiled = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(2):  # the first run must not have donated the scaler that `init` begins with
        params, opt_state = jax.tree.map(jnp.array, PARAMS), tx.init(PARAMS)
        for factor in [GOOD, BAD] + [GOOD] * 8:
            params, opt_state = compiled(params, opt_state, jnp.float32(factor))
    assert len(traces) == 1
    assert float(opt_state.scaler.scale) == 2.0**11


def test_members_of_an_axis_skip_together() -> None:
    tx = loss_scaled(optax.sgd(0.01), scaler(), axis_name="x")
    opt_state = tx.init(PARAMS)

    def one(factor: Any) -> Any:
        grads = scaled_grads(PARAMS, opt_state, factor)
        updates, after = tx.update(grads, opt_state, PARAMS)
        return updates, after.last_finite

    updates, finite = jax.jit(jax.vmap(one, axis_name="x"))(jnp.array([GOOD, BAD]))
    assert finite.tolist() == [False, False]
    assert not updates["w"].any()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_parameters_stay_sharded_in_a_skipped_step(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:4])
    tx = loss_scaled(master_weights(optax.sgd(0.5)), scaler())

    @jax.jit
    def step(weight: Any, opt_state: Any, factor: Any) -> Any:
        grads = jax.grad(lambda w: opt_state.scaler.scale_loss((w * factor).astype(jnp.float32).sum()))(weight)
        updates, opt_state = tx.update(grads, opt_state, weight)
        return optax.apply_updates(weight, updates), opt_state

    with jax.set_mesh(mesh):
        weight = jax.device_put(jnp.ones(8, jnp.float16), NamedSharding(mesh, PartitionSpec("x")))
        opt_state = tx.init(weight)
        for factor in (GOOD, BAD):
            weight, opt_state = step(weight, opt_state, jnp.float16(factor))
            np.testing.assert_array_equal(weight, np.full(8, 0.5))
            assert weight.sharding.spec == PartitionSpec("x")
    assert float(opt_state.scaler.scale) == 2.0**9


def test_extra_arguments_reach_the_optimizer() -> None:
    tx = loss_scaled(optax.contrib.reduce_on_plateau(patience=0, factor=0.5), scaler())
    opt_state = tx.init(PARAMS)
    update = jax.jit(lambda state, value: tx.update(scaled_grads(PARAMS, state, GOOD), state, PARAMS, value=value)[1])
    for value in (1.0, 1.0):
        opt_state = update(opt_state, value)
    assert float(opt_state.inner_state.scale) == 0.5


def test_a_disabled_scaler_leaves_the_program_of_the_optimizer() -> None:
    tx = optax.adam(0.01)
    off = loss_scaled(tx, GradScaler.create(enabled=False))
    plain = jax.make_jaxpr(lambda g, s: tx.update(g, s, PARAMS))(PARAMS, tx.init(PARAMS))
    wrapped = jax.make_jaxpr(lambda g, s: off.update(g, s, PARAMS)[0])(PARAMS, off.init(PARAMS))
    assert len(wrapped.eqns) == len(plain.eqns)


def test_gradients_in_float16_and_none_among_parameters_are_taken() -> None:
    tx = loss_scaled(optax.sgd(1.0), scaler())
    params = {"w": jnp.ones(2), "none": None}
    updates, _ = tx.update({"w": jnp.float16([2.0**-10] * 2), "none": None}, tx.init(params), params)
    assert updates["none"] is None
    assert updates["w"].dtype == jnp.float32
    np.testing.assert_array_equal(updates["w"], [-(2.0**-20)] * 2)


# What does not fit


def test_low_precision_moments_are_refused_and_masters_offered() -> None:
    params = {"w": jnp.ones(2, jnp.float16)}
    tx = loss_scaled(optax.adam(0.1), scaler())
    with pytest.raises(
        ScalingError, match=r"mu\['w'\] was float16\[2\] and became float32.*mezzo\.jax\.master_weights"
    ):
        tx.update(params, tx.init(params), params)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: loss_scaled(optax.sgd(0.1), 1024.0), r"scaler must be a mezzo\.jax\.GradScaler or None, not 1024\.0"),  # type: ignore[arg-type]
        (lambda: loss_scaled(optax.sgd(0.1), skip="where"), "skip must be 'cond' or 'select', not 'where'"),  # type: ignore[arg-type]
        (lambda: loss_scaled("adam"), r"Expected an optimizer of optax, got 'adam'; pass one such as optax\.adam"),
    ],
    ids=["scaler", "skip", "optimizer"],
)
def test_wrong_options_are_refused(make: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make()
