"""Train a digits classifier in float16 with a loss scaler, in two ways: by hand, and with the scaler inside of optax.

Run it with ``python examples/jax_float16_scaler.py``; it takes some seconds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

from mezzo.jax import GradScaler, apply_if, autocast, loss_scaled

STEPS, BATCH = 300, 100


class Net(nn.Module):
    """Three layers; the module itself says nothing about precision."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Give the logits of the ten digits."""
        x = nn.relu(nn.Dense(64)(x))
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(10)(x)


def digits() -> tuple[jax.Array, jax.Array]:
    """Give images with values up to 1, and labels, in a fixed random order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order], jnp.int32)


NET = Net()
OPTIMIZER = optax.adam(1e-3)
IMAGES, LABELS = digits()


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Give the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(NET.apply(params, images), labels).mean()


def batch_of(step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Take the batch of a step."""
    start = step * BATCH % (len(LABELS) - BATCH)
    return jax.lax.dynamic_slice_in_dim(IMAGES, start, BATCH), jax.lax.dynamic_slice_in_dim(LABELS, start, BATCH)


def by_hand(loss_fn: Any, scaler: GradScaler, params: Any) -> tuple[Any, GradScaler]:
    """Train with the scaler as a value beside the parameters and the optimizer's state."""

    @jax.jit
    def train_step(params: Any, opt_state: Any, scaler: GradScaler, step: jax.Array) -> tuple[Any, Any, GradScaler]:
        _, grads, check = scaler.value_and_grad(loss_fn)(params, *batch_of(step))

        def update(params: Any, opt_state: Any) -> tuple[Any, Any]:
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = apply_if(check, update, params, opt_state)  # left out if not finite
        return params, opt_state, scaler.update(check)

    opt_state = OPTIMIZER.init(params)
    for step in range(STEPS):
        params, opt_state, scaler = train_step(params, opt_state, scaler, step)
    return params, scaler


def by_optax(loss_fn: Any, scaler: GradScaler, params: Any) -> tuple[Any, GradScaler]:
    """Train with the scaler inside of the optimizer's state; only the loss has to know of it."""
    tx = loss_scaled(OPTIMIZER, scaler)

    @jax.jit
    def train_step(params: Any, opt_state: Any, step: jax.Array) -> tuple[Any, Any]:
        def scaled_loss(params: Any) -> jax.Array:
            return opt_state.scaler.scale_loss(loss_fn(params, *batch_of(step)))

        updates, opt_state = tx.update(jax.grad(scaled_loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for step in range(STEPS):
        params, opt_state = train_step(params, opt_state, step)
    return params, opt_state.scaler


def main() -> None:
    """Compare the ways with float32."""
    params = NET.init(jax.random.key(0), IMAGES[:1])
    measure = jax.jit(loss_fn)
    exact, _ = by_hand(loss_fn, GradScaler.create(enabled=False), params)
    expected = measure(exact, IMAGES, LABELS)
    print(f"float32: loss {measure(params, IMAGES, LABELS):.3f} -> {expected:.3f}")

    half = autocast(loss_fn, "float16")
    scaler = GradScaler.create(init_scale=2.0**20)  # too high: the first steps find the scale
    for way in (by_hand, by_optax):
        trained, after = way(half, scaler, params)
        loss = measure(trained, IMAGES, LABELS)
        print(
            f"float16, {way.__name__.replace('_', ' ')}: loss {loss:.3f}, within 3% of float32: "
            f"{bool(abs(loss - expected) < 0.03 * expected)}; {after.skipped} steps skipped, scale now {after.scale:.0f}"
        )


if __name__ == "__main__":
    main()
