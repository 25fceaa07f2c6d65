"""Autocast and rematerialization: what is kept for the backward, and by which policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mezzo.jax import autocast

from .seen import BF16, F32, arrays, distance, dots, equations, of, signature

Fn = Callable[..., Any]

CLOSE = 3e-2


def block(w: jax.Array, x: jax.Array) -> jax.Array:
    hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return jnp.sin(hidden @ w)


POLICIES: dict[str, Any] = {
    "none": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "offload": jax.checkpoint_policies.save_any_names_but_these("hidden"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", ["grad(autocast)", "autocast(grad)"])
def test_as_many_dots_are_computed_again_as_without_autocast(order: str, policy: str) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.checkpoint(block, policy=POLICIES[policy])(w, x))

    w, x = arrays((3, 3), (2, 3))
    made = jax.grad(autocast(loss)) if order == "grad(autocast)" else autocast(jax.grad(loss))
    assert signature(made, w, x) == signature(jax.grad(loss), w, x)
    assert dots(made, w, x) == {BF16: dots(jax.grad(loss), w, x)[F32]}
    if policy in ("none", "names"):
        assert distance(jax.jit(made)(w, x), jax.jit(jax.grad(loss))(w, x)) < CLOSE


def saved(fn: Fn, *args: Any) -> list[tuple[str, tuple[int, ...]]]:
    """What the backward of ``fn`` keeps, beside its arguments."""
    _, pullback = jax.vjp(fn, *args)
    given = {id(arg) for arg in args}
    kept = [leaf for leaf in jax.tree.leaves(pullback) if id(leaf) not in given]
    return sorted((leaf.dtype.name, leaf.shape) for leaf in kept if leaf.ndim)


def test_the_activation_saved_by_name_is_low() -> None:
    w, x = arrays((3, 3), (2, 3))
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    assert saved(jax.checkpoint(block, policy=policy), w, x) == [("float32", (2, 3))]
    assert saved(autocast(jax.checkpoint(block, policy=policy)), w, x) == [("bfloat16", (2, 3))]
    assert saved(autocast(jax.checkpoint(block)), w, x) == []
    assert saved(jax.checkpoint(autocast(block), policy=policy), w, x) == [("bfloat16", (2, 3))]


def test_the_name_and_the_policy_stay_in_the_jaxpr() -> None:
    w, x = arrays((3, 3), (2, 3))
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    made = autocast(jax.checkpoint(block, policy=policy, prevent_cse=False))
    (remat,) = [eqn for eqn in equations(made, w, x) if "jaxpr" in eqn.params and "policy" in eqn.params]
    assert remat.params["policy"] is policy
    assert remat.params["prevent_cse"] is False
    (name,) = [eqn for eqn in equations(made, w, x) if eqn.primitive.name == "name"]
    assert name.params["name"] == "hidden"
    assert of("name", made, w, x) == [("bfloat16", "bfloat16")]


@pytest.mark.parametrize("order", ["grad(autocast)", "autocast(grad)"])
def test_layers_scanned_with_remat(order: str) -> None:
    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        h, _ = lax.scan(lambda h, w: (jax.checkpoint(block)(w, h), None), x, ws)
        return jnp.sum(h**2)

    ws, x = arrays((3, 3, 3), (2, 3))
    made = jax.grad(autocast(loss)) if order == "grad(autocast)" else autocast(jax.grad(loss))
    assert dots(made, ws, x) == {BF16: dots(jax.grad(loss), ws, x)[F32]}
    assert signature(made, ws, x) == signature(jax.grad(loss), ws, x)
    # Three blocks of two dots each, forward and backward.
    assert distance(jax.jit(made)(ws, x), jax.jit(jax.grad(loss))(ws, x)) < 2 * CLOSE


def test_remat_around_autocast_and_static_arguments() -> None:
    def scaled(w: jax.Array, x: jax.Array, times: int) -> jax.Array:
        for _ in range(times):
            x = jnp.tanh(x @ w)
        return x

    w, x = arrays((3, 3), (2, 3))
    inside = jax.checkpoint(autocast(scaled), static_argnums=2)
    outside = autocast(jax.checkpoint(scaled, static_argnums=2))
    for made in (inside, outside):
        assert dots(lambda w: made(w, x, 2), w) == {BF16: 2}
        got = jax.jit(jax.grad(lambda w: jnp.sum(made(w, x, 2))))(w)
        assert distance(got, jax.grad(lambda w: jnp.sum(scaled(w, x, 2)))(w)) < CLOSE


def test_disabled_inside_of_remat_stays_disabled_in_the_backward() -> None:
    from mezzo.jax import disabled

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        @jax.checkpoint  # type: ignore[untyped-decorator]
        def inner(w: jax.Array, x: jax.Array) -> jax.Array:
            with disabled():
                return jnp.tanh(x @ w)

        return jnp.sum(inner(w, x) @ w)

    w, x = arrays((3, 3), (2, 3))
    found = dots(jax.grad(autocast(loss)), w, x)
    # Of the first layer: the dot, once more in the backward, and the gradient of w; of the second its own three but one.
    assert found[F32] == 3 - 1 + dots(jax.grad(loss), w, x)[F32] - found[BF16] - 2
    assert found[F32] >= 2
    assert found[BF16] >= 3
