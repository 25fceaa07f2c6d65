"""`master_weights`: parameters in low precision are the rounded float32 masters, after every step."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mezzo.errors import OptionError
from mezzo.jax.master_weights import MasterWeightsState, master_weights
from mezzo.jax.optax_wrappers import loss_scaled
from mezzo.jax.scaler import GradScaler

each_low = pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])


def rounded(master: Any, low: Any) -> np.ndarray[Any, Any]:
    """Round with NumPy, which no compiler changes."""
    return np.asarray(master).astype(low)


@each_low
def test_apply_updates_keeps_the_dtype_and_adds_in_float32(low: Any) -> None:
    """What the updates rely on: optax adds first and rounds then."""
    new = optax.apply_updates({"w": low(1.0), "none": None}, {"w": jnp.float32(1e-3), "none": None})
    assert new["w"].dtype == low
    # In float32 just above the middle between two float16 numbers; an update that was rounded first would fall short.
    base, update = jnp.float16(1.0), jnp.float32(2.0**-11 + 2.0**-23)
    assert float(optax.apply_updates(base, update)) == 1.0 + 2.0**-10
    assert float(base + jnp.float16(update)) == 1.0


@each_low
@pytest.mark.parametrize("compiled", [True, False])
def test_parameters_are_the_rounded_masters_to_the_bit(low: Any, compiled: bool) -> None:
    """Over magnitudes from 1e-6 to 1e3, with steps of up to five times the weight.

    Half of the masters lie next to the middle of two numbers of the low dtype, where rounding twice would show.
    """
    generator = np.random.default_rng(0)
    size = 20_000
    weights = generator.standard_normal(size) * 10.0 ** generator.uniform(-6, 3, size)
    masters = weights.astype(np.float32)
    steps = (masters * generator.uniform(-0.99, 4, size) * 10.0 ** generator.uniform(-6, 0, size)).astype(np.float32)
    middle = 1 << (15 if low == jnp.bfloat16 else 12)
    target = rounded(masters[: size // 2], low).astype(np.float32).view(np.int32) + middle
    steps[: size // 2] = (target + generator.integers(-2, 3, size // 2).astype(np.int32)).view(np.float32)
    steps[: size // 2] -= masters[: size // 2]

    tx = master_weights(optax.sgd(1.0))
    params, state = jnp.asarray(masters, low), tx.init(jnp.asarray(masters))

    def step(grads: Any, state: MasterWeightsState, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    updates, new, state = (jax.jit(step) if compiled else step)(-steps, state, params)
    assert (updates.dtype, new.dtype, state.masters.dtype) == (jnp.float32, low, jnp.float32)
    np.testing.assert_array_equal(np.asarray(new), rounded(state.masters, low))
    changed = np.asarray(new) != np.asarray(params)
    assert 0.1 < changed.mean() < 1.0


@each_low
def test_a_weight_that_nearly_vanishes_is_right_one_step_later(low: Any) -> None:
    """No float32 leads from 1 to 1e-6 by one addition; the error is below 2**-24, and gone with the next step."""
    tx = master_weights(optax.sgd(1.0))
    params = jnp.ones(1, low)
    state = tx.init(params)
    for grad, error in ((1.0 - 1e-6, 2.0**-24), (0.0, 0.0)):
        updates, state = tx.update(jnp.array([grad]), state, params)
        params = optax.apply_updates(params, updates)
        assert abs(float(params[0]) - float(rounded(state.masters, low)[0])) <= error


def test_small_steps_add_up() -> None:
    """0.1 % steps on bfloat16 weights: alone they never move; masters follow float32 to rounding of 400 sums."""

    def run(tx: Any, params: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            params, state = carry
            updates, state = tx.update(jnp.ones_like(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), None, length=400)[0]

    sgd = optax.sgd(1e-3)
    low, full = jnp.ones(2, jnp.bfloat16), jnp.ones(2)
    assert float(run(sgd, low)[0][0]) == 1.0
    params, state = run(master_weights(sgd), low)
    exact = run(sgd, full)[0]
    np.testing.assert_allclose(state.masters, exact, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(params), rounded(state.masters, jnp.bfloat16))


def test_masters_begin_with_all_digits_of_float32_parameters() -> None:
    full = {"w": jnp.array([1.001, 2.003])}
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), full)
    tx = master_weights(optax.sgd(0.0))
    state = tx.init(full)
    updates, state = tx.update(low, state, low)
    np.testing.assert_array_equal(state.masters["w"], full["w"])
    np.testing.assert_array_equal(np.asarray(optax.apply_updates(low, updates)["w"]), np.asarray(low["w"]))


def test_the_optimizer_sees_float32_only() -> None:
    params = {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.float16)}
    tx = master_weights(optax.adamw(0.1, weight_decay=0.5))
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    adam = optax.tree.get(state, "mu")
    assert {leaf.dtype.name for leaf in jax.tree.leaves((adam, optax.tree.get(state, "nu"), state.masters))} == {
        "float32"
    }


def test_other_leaves_have_no_masters_and_train_as_they_are() -> None:
    with jax.enable_x64(True):
        params = {
            "low": jnp.ones(2, jnp.bfloat16),
            "wide": jnp.ones(2, jnp.float64),
            "none": None,
            "z": jnp.ones(1, "complex64"),
        }
        tx = master_weights(optax.sgd(0.5))
        state = tx.init(params)
        assert (state.masters["wide"], state.masters["none"], state.masters["z"]) == (None, None, None)
        updates, state = jax.jit(tx.update)(params, state, params)
        new = optax.apply_updates(params, updates)
        assert all((leaf == 0.5).all() for leaf in new.values() if leaf is not None)
    assert {name: leaf.dtype.name for name, leaf in new.items() if leaf is not None} == {
        "low": "bfloat16",
        "wide": "float64",
        "z": "complex64",
    }


def test_float32_parameters_and_masters_do_not_share_a_buffer() -> None:
    """Or the two could not both be donated."""
    shared = jnp.ones(4)
    params = {"a": shared, "tied": shared}
    state = master_weights(optax.sgd(0.1)).init(params)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in (shared, *jax.tree.leaves(state.masters))]
    assert len(set(pointers)) == 3


def test_tied_leaves_are_stepped_each_by_its_own_gradient() -> None:
    shared = jnp.ones(2, jnp.bfloat16)
    params = {"a": shared, "tied": shared}
    tx = master_weights(optax.sgd(1.0))
    updates, _ = tx.update({"a": shared * 0.5, "tied": shared * 0.25}, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    assert (float(new["a"][0]), float(new["tied"][0])) == (0.5, 0.75)


def test_a_state_comes_back_from_a_checkpoint() -> None:
    tx = master_weights(optax.adam(0.1))
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    step = jax.jit(tx.update)
    _, state = step(params, tx.init(params), params)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    flat = jax.tree.unflatten(jax.tree.structure(tx.init(params)), leaves)
    for back in (pickle.loads(pickle.dumps(state)), flat):
        found, expected = step(params, back, params), step(params, state, params)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert step._cache_size() <= 2  # of NumPy arrays and of JAX's; no third


# With loss_scaled


@pytest.mark.parametrize("outer", ["scaled", "masters"])
def test_masters_and_loss_scaling_nest_both_ways(outer: str) -> None:
    adam, scaler = optax.adam(0.01), GradScaler.create(init_scale=2.0**10)
    tx = loss_scaled(master_weights(adam), scaler) if outer == "scaled" else master_weights(loss_scaled(adam, scaler))
    params = {"w": jnp.float16([1.0, 2.0])}
    state = tx.init(params)
    update = jax.jit(tx.update)
    expected, plain = {"w": jnp.array([1.0, 2.0])}, adam.init({"w": jnp.ones(2)})
    for factor in (1.0, jnp.inf, 1.0):
        scale = optax.tree.get(state, "scaler").scale
        grads = {"w": jnp.float16([0.5, 0.25]) * (scale * factor).astype(jnp.float16)}
        before = params
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if factor == 1.0:
            steps, plain = adam.update({"w": jnp.array([0.5, 0.25])}, plain, expected)
            expected = optax.apply_updates(expected, steps)
        else:
            np.testing.assert_array_equal(np.asarray(params["w"]), np.asarray(before["w"]))
        masters = optax.tree.get(state, "masters")["w"]
        # Compiled and not: a few units of float32 apart.
        np.testing.assert_allclose(masters, expected["w"], rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(params["w"]), rounded(masters, jnp.float16))
    assert float(optax.tree.get(state, "scaler").scale) == 2.0**9


# What does not fit


def test_parameters_are_needed() -> None:
    tx = master_weights(optax.sgd(0.1))
    with pytest.raises(
        OptionError, match=r"needs the parameters to step them; call tx\.update\(grads, state, params\)"
    ):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def test_another_tree_is_refused() -> None:
    tx = master_weights(optax.sgd(0.1))
    state = tx.init({"a": jnp.ones(2)})
    with pytest.raises(
        OptionError, match=r"was made for parameters in the tree .*'a'.* and got .*'b'.*; pass those that"
    ):
        tx.update({"b": jnp.ones(2)}, state, {"b": jnp.ones(2)})


def test_an_optimizer_is_needed() -> None:
    with pytest.raises(OptionError, match="Expected an optimizer of optax, got 3"):
        master_weights(3)
