"""Train a small network on JAX in float32 and in bfloat16: one line around the loss is the difference.

Run it with ``python examples/jax_mlp.py``; it takes a few seconds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from mezzo.jax import autocast, explain

Params = list[dict[str, jax.Array]]
OPTIMIZER = optax.adam(2e-3)


def digits() -> tuple[jax.Array, jax.Array]:
    """Load 1797 handwritten digits, 8x8 pixels, shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order])


def init(sizes: tuple[int, ...] = (64, 256, 256, 10)) -> Params:
    """Make float32 parameters. They stay float32: autocast casts them where they are used."""
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    return [
        {"weight": jax.random.normal(key, (before, after)) * before**-0.5, "bias": jnp.zeros(after)}
        for key, before, after in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def apply(params: Params, images: jax.Array) -> jax.Array:
    """Compute logits. Nothing here knows of precision."""
    *hidden, last = params
    for layer in hidden:
        images = jax.nn.gelu(images @ layer["weight"] + layer["bias"])
    return images @ last["weight"] + last["bias"]


def loss_fn(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, images), labels).mean()


def train(loss_fn: Any, images: jax.Array, labels: jax.Array) -> tuple[Params, float]:
    """Train for ten epochs.

    Args:
        loss_fn: The loss; it decides on precision.
        images: Images to train with.
        labels: Their digits.

    Returns:
        The parameters and the last loss.
    """

    @jax.jit  # around autocast, so that the rewrite happens once
    def step(params: Params, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = init()
    state = OPTIMIZER.init(params)
    for _ in range(10):
        for start in range(0, 1500, 50):
            batch = slice(start, start + 50)
            params, state, loss = step(params, state, images[batch], labels[batch])
    return params, float(loss)


def main() -> None:
    """Train in two precisions, compare, and show what the rewrite did."""
    images, labels = digits()
    print(f"{'loss':<10} {'last loss':>9} {'accuracy':>9}  dtypes of parameters")
    for name, loss in (("float32", loss_fn), ("autocast", autocast(loss_fn, "bfloat16"))):
        params, last = train(loss, images, labels)
        right = apply(params, images[1500:]).argmax(-1) == labels[1500:]
        kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
        print(f"{name:<10} {last:>9.4f} {float(right.mean()):>9.1%}  {', '.join(kinds)}")
    print(explain(autocast(loss_fn, "bfloat16"))(params, images[:50], labels[:50]))


if __name__ == "__main__":
    main()
