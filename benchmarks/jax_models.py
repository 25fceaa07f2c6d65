"""The models that JAX's ways are compared on: in float32 as one writes it, and in bfloat16 written by hand.

By hand means with care: products, bias adds and the stream of activations in bfloat16; norms, softmax and losses in
float32; weights cast where they are used, and the embedding looked up in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from numpy.random import Generator, default_rng

LOW = jnp.bfloat16
LAYERS, WIDTH, LENGTH, BATCH, HEADS, TOKENS = 4, 256, 128, 8, 8, 1024
MASKED = -1e9

Params = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A loss over parameters and data, three times.

    Attributes:
        arguments: Makes the parameters and the data from a seed.
        loss: In float32, for the ways that change what it computes in.
        by_hand: The same in bfloat16.
        float32_norms: `loss` with norms that say in so many words that they compute in float32 and return it. In float32
            it is the same program; not where inputs are cast. None where a model has no norms.
    """

    arguments: Callable[[int], tuple[Any, ...]]
    loss: Callable[..., Array]
    by_hand: Callable[..., Array]
    float32_norms: Callable[..., Array] | None = None


def _normal(numbers: Generator, *shape: int, scale: float = 1.0) -> Array:
    return jnp.asarray(scale * numbers.standard_normal(shape), jnp.float32)


def _dense_parameters(numbers: Generator, inner: int, outer: int) -> Params:
    return {"w": _normal(numbers, inner, outer, scale=inner**-0.5), "b": _normal(numbers, outer, scale=0.1)}


def _norm_parameters(numbers: Generator) -> Params:
    return {"g": 1.0 + _normal(numbers, WIDTH, scale=0.1), "b": _normal(numbers, WIDTH, scale=0.1)}


def _mlp_arguments(seed: int, *, sizes: tuple[int, ...], rows: int) -> tuple[Any, ...]:
    numbers = default_rng(seed)
    layers = [_dense_parameters(numbers, inner, outer) for inner, outer in pairwise(sizes)]
    return layers, _normal(numbers, rows, sizes[0]), _normal(numbers, rows, sizes[-1])


def _mlp_loss(layers: list[Params], x: Array, target: Array) -> Array:
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    x = x @ layers[-1]["w"] + layers[-1]["b"]
    return jnp.mean(jnp.square(x - target))


def _mlp_by_hand(layers: list[Params], x: Array, target: Array) -> Array:
    x = x.astype(LOW)
    for layer in layers[:-1]:
        x = jax.nn.relu(_dense_by_hand(x, layer["w"], layer["b"]))
    x = _dense_by_hand(x, layers[-1]["w"], layers[-1]["b"])
    return jnp.mean(jnp.square(x.astype(jnp.float32) - target))


def _transformer_arguments(seed: int, *, stacked: bool) -> tuple[Any, ...]:
    numbers = default_rng(seed)
    layers: Any = [_layer_parameters(numbers) for _ in range(LAYERS)]
    parameters = {
        "layers": jax.tree.map(lambda *each: jnp.stack(each), *layers) if stacked else layers,
        "table": _normal(numbers, TOKENS, WIDTH),
        "places": _normal(numbers, LENGTH, WIDTH, scale=0.1),
        "norm": _norm_parameters(numbers),
        "head": _normal(numbers, WIDTH, TOKENS, scale=WIDTH**-0.5),
    }
    ids, targets = (jnp.asarray(numbers.integers(TOKENS, size=(BATCH, LENGTH)), jnp.int32) for _ in range(2))
    return parameters, ids, targets


def _layer_parameters(numbers: Generator) -> Params:
    return {
        "norm1": _norm_parameters(numbers),
        "qkv": _dense_parameters(numbers, WIDTH, 3 * WIDTH),
        "out": _dense_parameters(numbers, WIDTH, WIDTH),
        "norm2": _norm_parameters(numbers),
        "up": _dense_parameters(numbers, WIDTH, 4 * WIDTH),
        "down": _dense_parameters(numbers, 4 * WIDTH, WIDTH),
    }


def _transformer_loss(norm: Callable[..., Array], parameters: Params, ids: Array, targets: Array) -> Array:
    x = parameters["table"][ids] + parameters["places"]
    x = _through_layers(partial(_layer, norm), x, parameters["layers"])
    x = norm(x, **parameters["norm"])
    return _cross_entropy(x @ parameters["head"], targets)


def _transformer_by_hand(parameters: Params, ids: Array, targets: Array) -> Array:
    x = (parameters["table"][ids] + parameters["places"]).astype(LOW)
    x = _through_layers(_layer_by_hand, x, parameters["layers"])
    x = _norm_by_hand(x, **parameters["norm"])
    return _cross_entropy((x @ parameters["head"].astype(LOW)).astype(jnp.float32), targets)


def _through_layers(layer: Callable[[Array, Params], Array], x: Array, layers: Any) -> Array:
    if isinstance(layers, list):
        for parameters in layers:
            x = layer(x, parameters)
        return x
    x, _ = lax.scan(lambda carry, parameters: (layer(carry, parameters), None), x, layers)
    return x


def _layer(norm: Callable[..., Array], x: Array, parameters: Params) -> Array:
    h = norm(x, **parameters["norm1"])
    h = _attention(_dense(h, **parameters["qkv"]))
    x = x + _dense(h, **parameters["out"])
    h = norm(x, **parameters["norm2"])
    h = jax.nn.gelu(_dense(h, **parameters["up"]))
    return x + _dense(h, **parameters["down"])


def _layer_by_hand(x: Array, parameters: Params) -> Array:
    h = _norm_by_hand(x, **parameters["norm1"])
    h = _attention_by_hand(_dense_by_hand(h, **parameters["qkv"]))
    x = x + _dense_by_hand(h, **parameters["out"])
    h = _norm_by_hand(x, **parameters["norm2"])
    h = jax.nn.gelu(_dense_by_hand(h, **parameters["up"]))
    return x + _dense_by_hand(h, **parameters["down"])


def _dense(x: Array, w: Array, b: Array) -> Array:
    return x @ w + b


def _dense_by_hand(x: Array, w: Array, b: Array) -> Array:
    return x @ w.astype(LOW) + b.astype(LOW)


def _attention(qkv: Array) -> Array:
    q, k, v = _heads(qkv)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(_causal(), scores, MASKED))
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(BATCH, LENGTH, WIDTH)


def _attention_by_hand(qkv: Array) -> Array:
    q, k, v = _heads(qkv)
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(_causal(), scores, MASKED)).astype(LOW)
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(BATCH, LENGTH, WIDTH)


def _heads(qkv: Array) -> list[Array]:
    return [each.reshape(BATCH, LENGTH, HEADS, WIDTH // HEADS) for each in jnp.split(qkv, 3, axis=-1)]


def _causal() -> Array:
    return jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


def _norm(x: Array, g: Array, b: Array) -> Array:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * g + b


def _float32_norm(x: Array, g: Array, b: Array) -> Array:
    return _norm(x.astype(jnp.float32), g, b)


def _norm_by_hand(x: Array, g: Array, b: Array) -> Array:
    return _norm(x.astype(jnp.float32), g, b).astype(LOW)


def _cross_entropy(logits: Array, targets: Array) -> Array:
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(found)


def _transformer(*, stacked: bool) -> Model:
    return Model(
        partial(_transformer_arguments, stacked=stacked),
        partial(_transformer_loss, _norm),
        _transformer_by_hand,
        partial(_transformer_loss, _float32_norm),
    )


def _mlp(*sizes: int, rows: int) -> Model:
    return Model(partial(_mlp_arguments, sizes=sizes, rows=rows), _mlp_loss, _mlp_by_hand)


MODELS: dict[str, Model] = {
    "mlp": _mlp(512, 1024, 512, 1024, 512, rows=512),
    "transformer": _transformer(stacked=False),
    "scan": _transformer(stacked=True),
    "call": _mlp(8, 8, 8, rows=4),
}
