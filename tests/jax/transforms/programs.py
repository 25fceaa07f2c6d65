"""Small random programs: what hypothesis draws, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

__all__ = ["Inputs", "SIZE", "has", "programs", "run"]

SIZE = 3
Inputs = dict[str, jax.Array]
Step = tuple[Any, ...]

# Each keeps numbers of about one at about one, so that errors of several steps stay comparable.
SMOOTH: dict[str, Callable[[jax.Array, Inputs], jax.Array]] = {
    "dot": lambda h, given: h @ given["w"],
    "einsum": lambda h, given: jnp.einsum("ij,kj->ik", h, given["w"]),
    "bias": lambda h, given: h + given["b"],
    "scale": lambda h, given: given["b"][:, None] * h,
    "residual": lambda h, given: h + given["x"],
    "tanh": lambda h, given: jnp.tanh(h),
    "sigmoid": lambda h, given: jax.nn.sigmoid(h),
    "softmax": lambda h, given: jax.nn.softmax(h),
    "gelu": lambda h, given: jax.nn.gelu(h),
    "swish": lambda h, given: jax.nn.silu(h),
    "softplus": lambda h, given: jax.nn.softplus(h) - 0.5,
    "exp": lambda h, given: jnp.exp(-jnp.square(h)),
    "log": lambda h, given: jnp.log(2.0 + jnp.square(h)),
    "power": lambda h, given: 0.1 * h**3,
    "literal": lambda h, given: h * 0.5 + 0.25,
    "eps": lambda h, given: h / (1.0 + jnp.abs(h) + 1e-8),
    "mean": lambda h, given: h - jnp.mean(h, axis=-1, keepdims=True),
    "norm": lambda h, given: h * lax.rsqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + 1.0),
    "sum": lambda h, given: jnp.sum(h, 0) / SIZE + h,
    "transpose": lambda h, given: h.T,
    "reverse": lambda h, given: h[::-1],
    "reshape": lambda h, given: h.reshape(-1).reshape(SIZE, SIZE),
    "concatenate": lambda h, given: jnp.concatenate([h, given["x"]])[1 : SIZE + 1],
    "pad": lambda h, given: jnp.pad(h, ((0, 1), (0, 0)))[1:],
    "roll": lambda h, given: jnp.roll(h, 1, 1),
    "gather": lambda h, given: h[given["ids"]],
    "scatter": lambda h, given: h.at[given["ids"]].add(0.5 * given["x"]),
    "update": lambda h, given: lax.dynamic_update_slice(h, given["b"][None], (1, 0)),
    "where": lambda h, given: jnp.where(given["mask"], h, 0.0),
    "attention": lambda h, given: jax.nn.softmax(jnp.where(given["mask"], h @ h.T, -1e9)) @ h,
    "additive": lambda h, given: jax.nn.softmax(h + (1.0 - given["mask"].astype(jnp.float32)) * -1e9),
    "cumsum": lambda h, given: jnp.cumsum(h, 0) / 2.0,
    "stack": lambda h, given: jnp.stack([h, given["x"], h]).mean(0),
    "integers": lambda h, given: h * given["ids"] / 2,
}
KINKED: dict[str, Callable[[jax.Array, Inputs], jax.Array]] = {
    "relu": lambda h, given: jax.nn.relu(h),
    "abs": lambda h, given: jnp.abs(h),
    "maximum": lambda h, given: jnp.maximum(h, given["x"]),
    "clip": lambda h, given: jnp.clip(h, -0.5, 1.5),
    "max": lambda h, given: h - jnp.max(h, -1, keepdims=True),
    "sort": lambda h, given: jnp.sort(h, -1),
}
ALL = SMOOTH | KINKED


def _scan(inner: Callable[[jax.Array], jax.Array], h: jax.Array, given: Inputs) -> jax.Array:
    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(inner(carry) + x)
        return carry, carry[0]

    last, rows = lax.scan(step, h, given["x"])
    return last + rows


AROUND: dict[str, Callable[[Callable[[jax.Array], jax.Array], jax.Array, Inputs], jax.Array]] = {
    "jit": lambda inner, h, given: jax.jit(inner)(h),
    "remat": lambda inner, h, given: jax.checkpoint(inner)(h),
    "scan": _scan,
    "cond": lambda inner, h, given: lax.cond(given["ids"][0] > 0, inner, lambda h: h * 0.5, h),
    "switch": lambda inner, h, given: lax.switch(given["ids"][1], [lambda h: h, inner, jnp.exp], h),
    "vmap": lambda inner, h, given: jax.vmap(inner)(jnp.stack([h, 0.5 * h])).mean(0),
    "fori": lambda inner, h, given: lax.fori_loop(0, 2, lambda _, h: jnp.tanh(inner(h)), h),
}


def programs(*, kinked: bool) -> st.SearchStrategy[tuple[Step, ...]]:
    """Draw programs: names of steps, and of functions around programs of their own."""
    simple = st.tuples(st.sampled_from(sorted(ALL if kinked else SMOOTH)))
    steps = st.lists(simple, min_size=1, max_size=3)
    around = st.tuples(st.sampled_from(sorted(AROUND)), steps.map(tuple))
    return st.lists(simple | around, min_size=2, max_size=5).map(tuple)


def run(program: tuple[Step, ...], h: jax.Array, given: Inputs) -> jax.Array:
    """Run a program on an array of three rows and columns."""
    for name, *inside in program:
        if inside:
            body = inside[0]
            h = AROUND[name](lambda h, body=body: run(body, h, given), h, given)
        else:
            h = ALL[name](h, given)
    return h


def has(program: tuple[Step, ...], name: str) -> bool:
    """Say whether a step is in a program."""
    return any(step[0] == name or (len(step) > 1 and has(step[1], name)) for step in program)
