"""A transformer whose layers are a loop: lax.scan over stacked weights, each step checkpointed, all of it in bfloat16.

An image of the digits is a sequence of eight rows. Run it with ``python examples/jax_transformer_scan.py``; it takes some
ten seconds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits

from mezzo.jax import autocast, explain

WIDTH, HEADS, LAYERS = 32, 4, 3
Params = dict[str, Any]


def digits() -> tuple[jax.Array, jax.Array]:
    """Load 1797 handwritten digits as sequences of eight rows of eight pixels, shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return jnp.asarray(images[order].reshape(-1, 8, 8) / 16, jnp.float32), jnp.asarray(labels[order])


def init() -> Params:
    """Make float32 parameters; those of the layers are stacked along the first axis."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    layers = {
        "qkv": normal(LAYERS, WIDTH, 3 * WIDTH),
        "out": normal(LAYERS, WIDTH, WIDTH),
        "up": normal(LAYERS, WIDTH, 4 * WIDTH),
        "down": normal(LAYERS, 4 * WIDTH, WIDTH),
        "norms": jnp.ones((LAYERS, 2, WIDTH)),
    }
    return {"rows": normal(8, WIDTH), "places": normal(8, WIDTH), "layers": layers, "head": normal(WIDTH, 10)}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalize by the root of the mean square. Squares, sums and the root run in float32 under autocast."""
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


def attention(x: jax.Array, layer: Params) -> jax.Array:
    """Let the rows look at each other."""
    q, k, v = jnp.split((x @ layer["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5, axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["out"]


def apply(params: Params, images: jax.Array) -> jax.Array:
    """Compute logits of a batch."""

    @jax.checkpoint  # nothing of a layer is kept for the backward pass but what goes in
    def step(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        x = x + attention(norm(x, layer["norms"][0]), layer)
        x = x + jax.nn.gelu(norm(x, layer["norms"][1]) @ layer["up"]) @ layer["down"]
        return x, None  # the carry is pinned to float32: the residual stream does not round from layer to layer

    x, _ = lax.scan(step, images @ params["rows"] + params["places"], params["layers"])
    return x.mean(1) @ params["head"]


def loss_fn(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, images), labels).mean()


FLOAT32 = jax.jit(jax.value_and_grad(loss_fn))
AUTOCAST = jax.jit(jax.value_and_grad(autocast(loss_fn)))  # the only difference
OPTIMIZER = optax.adam(2e-3)


@jax.jit
def update(params: Params, state: Any, grads: Params) -> tuple[Params, Any]:
    """Step the parameters."""
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def train(value_and_grad: Any, images: jax.Array, labels: jax.Array) -> tuple[Params, float]:
    """Train for five epochs; give the parameters and the last loss."""
    params = init()
    state = OPTIMIZER.init(params)
    for _ in range(5):
        for start in range(0, 1500, 50):
            loss, grads = value_and_grad(params, images[start : start + 50], labels[start : start + 50])
            params, state = update(params, state, grads)
    return params, float(loss)


def gradient_error(images: jax.Array, labels: jax.Array) -> float:
    """Compare gradients at the start with float32's; give the norm of the difference, relative."""
    params = init()
    (_, exact), (_, low) = FLOAT32(params, images, labels), AUTOCAST(params, images, labels)
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, low, exact)) / optax.tree.norm(exact))


def main() -> None:
    """Train in two precisions, and show which products ran in which dtype, inside of the loop too."""
    images, labels = digits()
    predict = jax.jit(apply)
    for name, value_and_grad in (("float32", FLOAT32), ("autocast", AUTOCAST)):
        params, last = train(value_and_grad, images, labels)
        right = predict(params, images[1500:]).argmax(-1) == labels[1500:]
        print(f"{name:<10} last loss {last:.4f}, accuracy {float(right.mean()):.1%}")
    print(f"gradients off by {gradient_error(images[:50], labels[:50]):.1%}, at most 5% are expected")
    report = explain(autocast(loss_fn))(params, images[:50], labels[:50])
    print(*report.dots, sep="\n")
    for warning in report.warnings:
        print(warning)


if __name__ == "__main__":
    main()
