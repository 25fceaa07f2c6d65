"""Attention with additive and boolean masks: no NaN where float32 gives none, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .nets import LOW_DTYPES, Case, Draw, check

BATCH, LENGTH, HEADS, SIZE = 2, 6, 2, 8
VALUES = {"-1e9": -1e9, "-inf": -np.inf, "finfo.min": float(np.finfo(np.float32).min)}
SHAPES = {
    "[T,T]": (LENGTH, LENGTH),
    "[B,1,1,T]": (BATCH, 1, 1, LENGTH),
    "[B,1,T,T]": (BATCH, 1, LENGTH, LENGTH),
    "[B,H,T,T]": (BATCH, HEADS, LENGTH, LENGTH),
}


def kept(shape: tuple[int, ...], *, empty_rows: bool) -> np.ndarray:
    """Say which keys a row sees; with `empty_rows` the last row of the mask sees none."""
    keep = np.random.default_rng(0).random(shape) < 0.6
    keep[..., 0] = True
    if empty_rows:
        keep.reshape(-1, shape[-1])[-1] = False
    return keep


def scores(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k, v = (jnp.einsum("btd,dhe->bthe", x, params[name]) for name in "qkv")
    return jnp.einsum("bqhe,bkhe->bhqk", q, k) * SIZE**-0.5, v


def attend(logits: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(logits, axis=-1), v)


def parameters() -> tuple[Any, jax.Array]:
    draw, width = Draw(), HEADS * SIZE
    params = {name: draw(width, HEADS, SIZE, scale=width**-0.5) for name in "qkv"}
    return params, draw(BATCH, LENGTH, width, scale=1.0)


# How a mask comes to the logits: (logits, which to keep, the value) -> logits.
INSIDE: dict[str, Callable[[jax.Array, jax.Array, float], jax.Array]] = {
    "where(keep, logits, value)": lambda logits, keep, value: jnp.where(keep, logits, value),
    "logits + where(keep, 0, value)": lambda logits, keep, value: logits + jnp.where(keep, 0.0, value),
    "logits + (1 - keep) * value": lambda logits, keep, value: logits + (1.0 - keep.astype(jnp.float32)) * value,
}


@cache
def masked_inside() -> Case:
    """Attention which makes its masks itself; the outputs are named by the way and the value."""

    def loss(params: Any, x: jax.Array, keep: jax.Array, keep_some: jax.Array) -> tuple[jax.Array, Any]:
        logits, v = scores(params, x)
        outputs = {}
        for how, mask in INSIDE.items():
            for name, value in VALUES.items():
                if "1 - keep" in how and name == "-inf":
                    continue  # 0 * -inf is NaN in float32 too, and so is a row of -inf alone
                masked = mask(logits, keep_some if name == "-inf" else keep, value)
                outputs[f"{how} {name}"] = attend(masked, v)
        return sum(jnp.mean(out**2) for out in outputs.values()), outputs

    shape = SHAPES["[B,1,T,T]"]
    return Case(loss, *parameters(), kept(shape, empty_rows=True), kept(shape, empty_rows=False))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_attention_that_makes_its_masks_agrees_with_float32(dtype: str) -> None:
    # In a row, two products, their softmax and its sum.
    check(masked_inside(), dtype, value=4, gradient=6)


@cache
def masked_by_arrays() -> Case:
    """Attention which is given its masks as float32 arrays; the outputs are named by the shape and the value in them."""

    def loss(params: Any, x: jax.Array, masks: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        logits, v = scores(params, x)
        outputs = {name: attend(logits + mask, v) for name, mask in masks.items()}
        return sum(jnp.mean(out**2) for out in outputs.values()), outputs

    masks = {
        f"{shape} {name}": np.where(kept(SHAPES[shape], empty_rows=name != "-inf"), 0.0, value).astype(np.float32)
        for name, value in VALUES.items()
        for shape in SHAPES
    }
    return Case(loss, *parameters(), masks)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_attention_with_masks_as_arrays_agrees_with_float32(dtype: str) -> None:
    check(masked_by_arrays(), dtype, value=4, gradient=6)


@cache
def hard_masks() -> Case:
    """Rows that see nothing where the sum of logits and mask goes beyond float16, however the mask is cast to it."""

    def loss(params: Any, x: jax.Array, mask: jax.Array, padding: jax.Array) -> tuple[jax.Array, Any]:
        logits, v = scores(params, x)
        outputs = {
            "low logits": attend(logits - 24.0 + mask, v),
            "two masks": attend(logits + mask + padding, v),
            "mask of one axis": attend(logits + padding[:1], v),
        }
        return sum(jnp.mean(out**2) for out in outputs.values()), outputs

    mask = np.where(kept(SHAPES["[B,1,T,T]"], empty_rows=True), 0.0, -1e9).astype(np.float32)
    return Case(loss, *parameters(), mask, np.full(SHAPES["[B,1,1,T]"], -1e9, np.float32))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_sums_of_masks_and_logits_do_not_leave_the_range(dtype: str) -> None:
    check(hard_masks(), dtype, value=4, gradient=6)


def test_the_masks_have_rows_that_see_nothing_and_float32_has_no_nan() -> None:
    for shape in SHAPES.values():
        assert (~kept(shape, empty_rows=True)).all(-1).sum() == 1
        assert kept(shape, empty_rows=False).any(-1).all()
    for case in (masked_by_arrays(), masked_inside(), hard_masks()):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(case.expected))


# Options of jax.nn.dot_product_attention, from (a mask of booleans, a bias).
OPTIONS: dict[str, Callable[[jax.Array, jax.Array], dict[str, Any]]] = {
    "mask and bias": lambda mask, bias: {"mask": mask, "bias": bias},
    "causal": lambda mask, bias: {"is_causal": True, "scale": 0.5},
    "lengths": lambda mask, bias: {"key_value_seq_lengths": jnp.array([2, LENGTH]), "is_causal": True},
}


@cache
def library_attention() -> Case:
    def loss(params: Any, x: jax.Array, mask: jax.Array, bias: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, params[name]) for name in "qkv")
        k, v = k[:, :, :1], v[:, :, :1]  # one head of keys and values for all heads of queries
        outputs = {
            name: jax.nn.dot_product_attention(q, k, v, **options(mask, bias)) for name, options in OPTIONS.items()
        }
        return sum(jnp.mean(out**2) for out in outputs.values()), outputs

    bias = Draw(1)(1, HEADS, LENGTH, LENGTH, scale=1.0)
    return Case(loss, *parameters(), kept(SHAPES["[B,1,T,T]"], empty_rows=True), bias)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_the_attention_of_jax_agrees_with_float32(dtype: str) -> None:
    check(library_attention(), dtype, value=4, gradient=10)
