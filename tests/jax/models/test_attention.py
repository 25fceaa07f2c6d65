"""Attention with additive and boolean masks: no NaN where float32 gives none, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mezzo.jax import autocast

from .nets import LOW_DTYPES, Case, Draw, check, check_close, check_dots, run, unit

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
def far_masks() -> Case:
    """Rows that see nothing where the sum of logits and masks is below the least float16, though each of them is not."""

    def loss(params: Any, x: jax.Array, mask: jax.Array, padding: jax.Array) -> tuple[jax.Array, Any]:
        logits, v = scores(params, x)
        outputs = {
            # The last row of the mask is one number everywhere: there the softmax is that of equal logits.
            "low logits": attend(logits - 24.0 + mask, v),
            "two masks": attend(logits + mask + padding, v),
        }
        return sum(jnp.mean(out**2) for out in outputs.values()), outputs

    mask = np.where(kept(SHAPES["[B,1,T,T]"], empty_rows=True), 0.0, -1e9).astype(np.float32)
    return Case(loss, *parameters(), mask, np.full(SHAPES["[B,1,1,T]"], -1e9, np.float32))


def test_sums_of_logits_and_masks_stay_in_the_range() -> None:
    # One rounding of a logit near -24 is 24 units of the differences between logits, of which the softmax is made.
    check(far_masks(), "bfloat16", value=12, gradient=24)


def test_sums_of_logits_and_masks_stay_in_the_range_of_float16() -> None:
    """What a row that sees nothing gives depends on rounding, in float32 too; it has to be finite, and others right."""
    case = far_masks()
    (_, outputs), gradients = case.under_autocast("float16")[0]
    (_, expected), _ = case.expected
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((outputs, gradients)))
    for name, limit in (("low logits", 12), ("two masks", 12)):
        hidden = np.zeros(outputs[name].shape, bool)
        hidden[-1, -1] = name == "low logits"
        check_close(np.where(hidden, 0, outputs[name]), np.where(hidden, 0, expected[name]), limit * unit("float16"))


@pytest.mark.parametrize(("dtype", "value"), [("float16", "-1e9"), ("float16", "finfo.min"), ("bfloat16", "-1e9")])
def test_a_mask_of_one_sequence_that_hides_every_key_gives_no_nan(dtype: str, value: str) -> None:
    """A mask [1,1,1,T] has the shape of a bias."""

    def masked(params: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
        logits, v = scores(params, x)
        return attend(logits + mask, v)

    args = (*parameters(), np.full((1, 1, 1, LENGTH), VALUES[value], np.float32))
    got, jaxpr = run(autocast(masked, dtype), *args)
    check_dots(jaxpr, dtype, total=5)
    check_close(got, run(masked, *args)[0], 4 * unit(dtype))


def test_the_masks_have_rows_that_see_nothing_and_float32_has_no_nan() -> None:
    for shape in SHAPES.values():
        assert (~kept(shape, empty_rows=True)).all(-1).sum() == 1
        assert kept(shape, empty_rows=False).any(-1).all()
    for case in (masked_by_arrays(), masked_inside(), far_masks()):
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
