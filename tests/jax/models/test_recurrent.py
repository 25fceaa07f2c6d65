"""Recurrent nets, written with `lax.scan`: the state is carried in float32, the products run low."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from .nets import LOW_DTYPES, Case, Draw, check, dots, equations

WIDTH = 8


def lstm_cell(params: Any, carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
    cell, hidden = carry
    gates = x @ params["x"] + hidden @ params["h"] + params["b"]
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(f + 1.0) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return (cell, hidden), hidden


def gru_cell(params: Any, carry: tuple[jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
    (hidden,) = carry
    rx, zx, nx = jnp.split(x @ params["x"] + params["b"], 3, axis=-1)
    rh, zh, nh = jnp.split(hidden @ params["h"], 3, axis=-1)
    update = jax.nn.sigmoid(zx + zh)
    hidden = (1.0 - update) * jnp.tanh(nx + jax.nn.sigmoid(rx + rh) * nh) + update * hidden
    return (hidden,), hidden


CELLS = {"lstm": (lstm_cell, 4, 2), "gru": (gru_cell, 3, 1)}


@cache
def recurrent(name: str) -> Case:
    cell, gates, states = CELLS[name]

    def loss(params: Any, xs: jax.Array) -> tuple[jax.Array, Any]:
        start = tuple(jnp.zeros(xs.shape[1:]) for _ in range(states))
        last, hidden = lax.scan(lambda carry, x: cell(params, carry, x), start, xs)
        return jnp.mean((hidden - 0.5) ** 2), (last, hidden)

    draw = Draw()
    params = {"x": draw(WIDTH, gates * WIDTH), "h": draw(WIDTH, gates * WIDTH), "b": draw(gates * WIDTH, scale=0.1)}
    return Case(loss, params, draw(12, 4, WIDTH, scale=1.0))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("name", CELLS)
def test_a_recurrent_net_agrees_with_float32(name: str, dtype: str) -> None:
    # Twelve steps feed each other, and a step rounds several times; the gates are bounded, so errors do not grow.
    check(recurrent(name), dtype, value=3, gradient=6)


@pytest.mark.parametrize("name", CELLS)
def test_the_state_of_a_recurrent_net_is_carried_in_float32_and_multiplied_low(name: str) -> None:
    _, jaxpr = recurrent(name).under_autocast("bfloat16")
    scan = next(eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan" and not eqn.params["reverse"])
    first, count = scan.params["num_consts"], scan.params["num_carry"]
    carried = [str(aval.dtype) for aval in scan.params["jaxpr"].in_avals[first : first + count]]
    assert [dtype for dtype in carried if "float" in dtype] == ["float32"] * CELLS[name][2]
    assert dots(scan.params["jaxpr"]) == {("bfloat16",) * 3: 2}
