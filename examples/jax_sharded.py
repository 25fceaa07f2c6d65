"""Data parallel training in bfloat16 over eight devices: by jit with shardings, and by shard_map with a mean of its own.

A CPU stands in for the eight. Run it with ``python examples/jax_sharded.py``; it takes a few seconds.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

from mezzo.jax import autocast

Params = dict[str, jax.Array]
Step = Callable[[Params, jax.Array, jax.Array], tuple[Params, jax.Array]]


def digits() -> tuple[jax.Array, jax.Array]:
    """Load 1600 handwritten digits, 8x8 pixels, shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[:1600]
    return jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order])


def init() -> Params:
    """Make float32 parameters."""
    first, second = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(first, (64, 256)) / 8,
        "bias": jnp.zeros(256),
        "down": jax.random.normal(second, (256, 10)) / 16,
    }


@autocast
def loss_fn(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the mean cross-entropy."""
    hidden = jax.nn.relu(images @ params["up"] + params["bias"])
    logits = jax.nn.log_softmax(hidden @ params["down"])
    return -jnp.take_along_axis(logits, labels[:, None], axis=1).mean()


def step(params: Params, images: jax.Array, labels: jax.Array) -> tuple[Params, jax.Array]:
    """Descend once. Under jit with sharded arguments the compiler adds the communication."""
    loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
    return jax.tree.map(lambda weight, grad: weight - 0.3 * grad, params, grads), loss


def step_of_a_shard(params: Params, images: jax.Array, labels: jax.Array) -> tuple[Params, jax.Array]:
    """Descend once with one device's part of the batch; the loss is averaged here, and so are the gradients, in float32."""

    def mean_loss(params: Params) -> jax.Array:
        return lax.pmean(loss_fn(params, images, labels), "data")

    loss, grads = jax.value_and_grad(mean_loss)(params)
    return jax.tree.map(lambda weight, grad: weight - 0.3 * grad, params, grads), loss


def train(step: Step, images: jax.Array, labels: jax.Array) -> tuple[Params, float]:
    """Train for 60 steps on all images; give the parameters and the last loss."""
    params, step = init(), jax.jit(step)
    for _ in range(60):
        params, loss = step(params, images, labels)
        loss.block_until_ready()  # eight devices on two cores: steps that run ahead would wait for each other's sums
    return params, float(loss)


def furthest(params: Params, others: Params) -> float:
    """Give the largest distance between two sets of parameters."""
    return max(float(jnp.abs(params[name] - np.asarray(others[name])).max()) for name in params)


def main() -> None:
    """Train on one device and, in two ways, on eight; compare."""
    images, labels = digits()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_hand = jax.shard_map(step_of_a_shard, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    alone, loss = train(step, images, labels)
    print(f"one device   last loss {loss:.4f}")
    sharded = jax.device_put((images, labels), NamedSharding(mesh, P("data")))
    for name, way in (("jit", step), ("shard_map", by_hand)):
        params, loss = train(way, *sharded)
        near = furthest(params, alone) < 0.01
        print(f"{name:<12} last loss {loss:.4f}, on {len(sharded[0].devices())} devices; parameters as on one: {near}")


if __name__ == "__main__":
    main()
