"""Flax models in bfloat16: linen's are functions already, NNX's are split before and merged inside.

Run it with ``python examples/jax_flax.py``; it takes some ten seconds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from sklearn.datasets import load_digits

from mezzo.errors import MutationError
from mezzo.jax import autocast

OPTIMIZER = optax.adam(5e-3)


def digits() -> tuple[jax.Array, jax.Array]:
    """Load 1797 handwritten digits, 8x8 pixels, shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order])


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# Linen


class Linen(linen.Module):
    """A small network without a word on dtypes: no ``dtype=`` has to be handed down."""

    @linen.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Compute logits."""
        hidden = linen.BatchNorm(use_running_average=not train)(linen.Dense(128)(images))
        return linen.Dense(10)(jax.nn.relu(hidden))


def train_linen(images: jax.Array, labels: jax.Array) -> tuple[float, set[str]]:
    """Train for three epochs; give the accuracy and the dtypes of all variables."""
    model = Linen()
    variables = model.init(jax.random.key(0), images[:1], train=True)

    @autocast
    def loss_fn(params: Any, stats: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        logits, changed = model.apply(
            {"params": params, "batch_stats": stats}, images, train=True, mutable=["batch_stats"]
        )
        return cross_entropy(logits, labels), changed["batch_stats"]  # float32, as it came in

    @jax.jit
    def step(params: Any, stats: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, Any]:
        grads, stats = jax.grad(loss_fn, has_aux=True)(params, stats, images, labels)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), stats, state

    params, stats = variables["params"], variables["batch_stats"]
    state = OPTIMIZER.init(params)
    for start in [*range(0, 1500, 50)] * 3:
        batch = slice(start, start + 50)
        params, stats, state = step(params, stats, state, images[batch], labels[batch])
    logits = jax.jit(autocast(model.apply), static_argnames="train")(
        {"params": params, "batch_stats": stats}, images[1500:], train=False
    )
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves((params, stats, logits))}
    return float((logits.argmax(-1) == labels[1500:]).mean()), kinds


# NNX


class Nnx(nnx.Module):
    """The same network; its batch norm changes itself when it is called."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Make the layers."""
        self.first, self.norm = nnx.Linear(64, 128, rngs=rngs), nnx.BatchNorm(128, rngs=rngs)
        self.last = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Compute logits."""
        return self.last(jax.nn.relu(self.norm(self.first(images))))


def train_nnx(images: jax.Array, labels: jax.Array) -> tuple[float, set[str]]:
    """Train for three epochs; give the accuracy and the dtypes of all state."""
    model = Nnx(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @autocast
    def loss_fn(params: Any, rest: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, rest, copy=True)  # a copy: the arguments stay as they are
        loss = cross_entropy(model(images), labels)
        return loss, nnx.state(model, nnx.Not(nnx.Param))  # what the batch norm has changed goes out as a result

    @jax.jit
    def step(params: Any, rest: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, Any]:
        grads, rest = jax.grad(loss_fn, has_aux=True)(params, rest, images, labels)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), rest, state

    state = OPTIMIZER.init(params)
    for start in [*range(0, 1500, 50)] * 3:
        batch = slice(start, start + 50)
        params, rest, state = step(params, rest, state, images[batch], labels[batch])
    nnx.update(model, params, rest)
    model.eval()
    right = model(images[1500:]).argmax(-1) == labels[1500:]
    return float(right.mean()), {str(leaf.dtype) for leaf in jax.tree.leaves((params, rest))}


def main() -> None:
    """Train both, and show what is said to a model that would lose its state."""
    images, labels = digits()
    for name, train in (("linen", train_linen), ("nnx", train_nnx)):
        accuracy, kinds = train(images, labels)
        print(f"{name:<6} accuracy {accuracy:.1%}, all of it stored in {', '.join(kinds)}")
    model = Nnx(nnx.Rngs(0))
    try:
        autocast(lambda model, images: model(images))(model, images[:50])
    except MutationError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
