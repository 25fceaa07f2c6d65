"""Checkpoints of Flax hold a scaler, alone and inside of a train state."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from mezzo.jax import GradScaler, loss_scaled

serialization = pytest.importorskip("flax.serialization")


def moved() -> GradScaler:
    return GradScaler.create(init_scale=1024.0, growth_interval=3).update(True).update(False).update(True)


def same(one: GradScaler, other: GradScaler) -> bool:
    return (one.state(), int(one.skipped)) == (other.state(), int(other.skipped))


def test_a_scaler_comes_back_from_bytes() -> None:
    fresh = GradScaler.create(init_scale=8.0)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(moved()))
    assert same(restored, moved())
    assert restored.scale.dtype == jnp.float32
    # What is static is that of the object restored into, as with Flax's own.
    assert restored.scaling == fresh.scaling


def test_a_train_state_with_a_scaled_optimizer_comes_back() -> None:
    optax = pytest.importorskip("optax")
    train_state = pytest.importorskip("flax.training.train_state")

    def state(scaler: GradScaler) -> Any:
        params = {"w": jnp.ones(2)}
        return train_state.TrainState.create(apply_fn=None, params=params, tx=loss_scaled(optax.adam(1e-3), scaler))

    restored = serialization.from_bytes(state(GradScaler.create()), serialization.to_bytes(state(moved())))
    assert same(restored.opt_state.scaler, moved())


def test_what_was_saved_as_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="has no growth_tracker, nan_backoffs, skipped"):
        serialization.from_state_dict(GradScaler.create(), {"scale": 1.0})
