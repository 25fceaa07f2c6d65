"""Layers stacked into one array and run by `lax.scan`, computed anew in the backward pass by `jax.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mezzo.jax import autocast

from .nets import Case, Draw, check, check_dots, equations

LAYERS, WIDTH, HEADS, LENGTH = 3, 8, 2, 6


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer(x: jax.Array, params: Any) -> jax.Array:
    """Attention and a gated dense layer, each added to what comes in."""
    h = normed(x, params["scale1"])
    q, k, v = jnp.split((h @ params["qkv"]).reshape(LENGTH, HEADS, -1), 3, axis=-1)
    logits = jnp.einsum("qhe,khe->hqk", q, k) * q.shape[-1] ** -0.5
    logits = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), logits, -1e9)
    mixed = jnp.einsum("hqk,khe->qhe", jax.nn.softmax(logits), v).reshape(LENGTH, WIDTH)
    x = x + checkpoint_name(mixed @ params["o"], "mixed")
    one, two = jnp.split(normed(x, params["scale2"]) @ params["up"], 2, axis=-1)
    return x + (jax.nn.silu(one) * two) @ params["down"]


POLICIES: dict[str, Callable[[Any], Any]] = {
    "no checkpoint": lambda f: f,
    "nothing saved": jax.checkpoint,
    "dots saved": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "names saved": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("mixed")),
}


@cache
def stacked(policy: str) -> Case:
    wrapped = POLICIES[policy](layer)

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, _ = lax.scan(lambda x, params: (wrapped(x, params), None), x, params)
        return jnp.mean((out - 1.0) ** 2), out

    draw = Draw()
    params = {
        "scale1": 1 + draw(LAYERS, WIDTH, scale=0.1),
        "scale2": 1 + draw(LAYERS, WIDTH, scale=0.1),
        "qkv": draw(LAYERS, WIDTH, 3 * WIDTH, scale=WIDTH**-0.5),
        "o": draw(LAYERS, WIDTH, WIDTH, scale=WIDTH**-0.5),
        "up": draw(LAYERS, WIDTH, 4 * WIDTH, scale=WIDTH**-0.5),
        "down": draw(LAYERS, 2 * WIDTH, WIDTH, scale=(2 * WIDTH) ** -0.5),
    }
    case = Case(loss, params, draw(LENGTH, WIDTH, scale=1.0))
    if policy != "no checkpoint":
        # What is computed anew has the same values, and to compile it in float32 for each policy takes seconds.
        case.expected = stacked("no checkpoint").expected
    return case


@pytest.mark.parametrize("policy", ["nothing saved", "dots saved"])
def test_a_scan_over_layers_with_checkpoints_agrees_with_float32(policy: str) -> None:
    check(stacked(policy), "bfloat16", value=4, gradient=8)


def test_a_scan_over_layers_with_checkpoints_agrees_with_float32_in_float16() -> None:
    check(stacked("nothing saved"), "float16", value=4, gradient=8)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_decides_what_the_scan_keeps_for_the_backward_pass(policy: str) -> None:
    """As many arrays of activations come out of the forward scan as in float32, and none of them is larger."""
    case = stacked(policy)
    jaxpr = jax.make_jaxpr(jax.grad(autocast(case.loss), has_aux=True))(*case.args)
    check_dots(jaxpr, "bfloat16", total=case.dots)
    plain, low = kept_by_scan(case.traced.jaxpr), kept_by_scan(jaxpr)
    assert sum(low) <= sum(plain)
    if policy == "nothing saved":
        assert len(low) == len(plain)
    else:
        assert sum(low) < sum(plain)


def kept_by_scan(jaxpr: Any) -> list[int]:
    """Give the bytes of what the forward scan stacks up."""
    scan = next(eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan" and not eqn.params["reverse"])
    stacks = scan.outvars[scan.params["num_carry"] :]
    return [var.aval.size * var.aval.dtype.itemsize for var in stacks]
