"""An Equinox model in bfloat16: modules are pytrees, so they go through autocast as they are.

Run it with ``python examples/jax_equinox.py``; it takes a few seconds.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from mezzo.jax import autocast, explain


class Classifier(eqx.Module):
    """A convolution, a layer norm that computes in float32 by itself, a linear layer, and settings that are no arrays."""

    conv: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear
    slope: float  # a Python number stays one
    activated: bool  # and so does what decides on branches

    def __init__(self, key: jax.Array) -> None:
        """Make the layers."""
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 16, 3, padding=1, key=first)
        self.norm = eqx.nn.LayerNorm((16, 8, 8))
        self.last = eqx.nn.Linear(16 * 64, 10, key=second)
        self.slope, self.activated = 0.1, True

    def __call__(self, image: jax.Array) -> jax.Array:
        """Compute the logits of one image."""
        hidden = self.norm(self.conv(image[None]))
        if self.activated:
            hidden = jax.nn.leaky_relu(hidden, self.slope)
        return self.last(hidden.reshape(-1))


def digits() -> tuple[jax.Array, jax.Array]:
    """Load 1797 handwritten digits, 8x8 pixels, shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return jnp.asarray(images[order].reshape(-1, 8, 8) / 16, jnp.float32), jnp.asarray(labels[order])


@autocast
def loss_fn(model: Classifier, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels).mean()


def main() -> None:
    """Train for two epochs, and count the casts."""
    images, labels = digits()
    optimizer = optax.adam(2e-3)

    @eqx.filter_jit
    def step(model: Classifier, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Classifier, Any, jax.Array]:
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, images, labels)
        updates, state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, loss

    model = Classifier(jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    for start in [*range(0, 1500, 50)] * 2:
        model, state, loss = step(model, state, images[start : start + 50], labels[start : start + 50])
    right = jax.vmap(model)(images[1500:]).argmax(-1) == labels[1500:]
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))}
    print(f"last loss {float(loss):.4f}, accuracy {float(right.mean()):.1%}, parameters in {', '.join(kinds)}")
    report = explain(loss_fn)(model, images[:50], labels[:50])
    print(*report.dots, sep="\n")
    print(f"warnings: {len(report.warnings)}")


if __name__ == "__main__":
    main()
