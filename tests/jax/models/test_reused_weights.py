"""Gradients of weights which are used many times: each use has a cast of its own, so the sum over the uses is float32.

The limits are 1.5 times what was measured in bfloat16, and a small part of what casting the weights once costs: there the
cotangents of all uses are summed in bfloat16, in which 256 + 1 is 256.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mezzo.jax import autocast

from .nets import Draw, check_dots, dots, equations, relative_error, run

LOW = "bfloat16"
ROWS, IDS = 32, 65_536
STEPS, USES = 1000, 64


@dataclass(frozen=True)
class Reuse:
    """A loss of weights (by name) and data.

    `limits` says how far the gradient of a weight may be off, and how many times further it must be off at least where the
    weights and the data are cast once, in front of the net.
    """

    loss: Callable[..., jax.Array]
    weights: dict[str, jax.Array]
    data: tuple[Any, ...]
    limits: dict[str, tuple[float, float]]

    @cached_property
    def expected(self) -> Any:
        return self.gradients(jax.grad(self.loss))

    @cached_property
    def cast_once(self) -> Any:
        def loss(weights: Any, *data: Any) -> jax.Array:
            weights, data = jax.tree.map(lambda x: x.astype(LOW) if x.dtype == jnp.float32 else x, (weights, data))
            return self.loss(weights, *data).astype(jnp.float32)

        return self.gradients(jax.grad(loss))[0]

    def gradients(self, fn: Callable[..., Any]) -> tuple[Any, Any]:
        """Give what a function makes of the weights and the data, and its jaxpr."""
        return run(fn, self.weights, *self.data)


def embedding_of(rows: Callable[[jax.Array, jax.Array], jax.Array], worse: float) -> Reuse:
    def loss(weights: Any, ids: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(rows(weights["table"], ids) @ weights["out"]) ** 2)

    draw = Draw()
    ids = np.random.default_rng(0).integers(0, ROWS, IDS, dtype=np.int32)
    return Reuse(loss, {"table": draw(ROWS, 16, scale=1.0), "out": draw(16, 8)}, (ids,), {"table": (0.0104, worse)})


def embedding_by_gather() -> Reuse:
    return embedding_of(lambda table, ids: table[ids], 50)


def embedding_by_one_hot() -> Reuse:
    # A product: it sums the rows in float32 and rounds once, cast once or not.
    return embedding_of(lambda table, ids: jax.nn.one_hot(ids, ROWS) @ table, 0)


def recurrent_net() -> Reuse:
    def loss(weights: Any, xs: jax.Array) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(x @ weights["wx"] + h @ weights["wh"] + weights["b"])
            return h, h

        return jnp.mean(lax.scan(step, jnp.zeros(xs.shape[1:], xs.dtype), xs)[1] ** 2)

    draw = Draw()
    weights = {"wh": draw(16, 16, scale=0.125), "wx": draw(16, 16, scale=0.125), "b": draw(16, scale=0.5)}
    limits = {"wh": (0.0038, 20), "wx": (0.0032, 20), "b": (0.0113, 20)}
    return Reuse(loss, weights, (draw(STEPS, 4, 16, scale=1.0),), limits)


def sum_over_steps() -> Reuse:
    def loss(weights: Any, xs: jax.Array) -> jax.Array:
        def step(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + jnp.sum((x @ weights["w"]) ** 2), None

        return lax.scan(step, jnp.zeros((), xs.dtype), xs)[0] / STEPS

    draw = Draw()
    return Reuse(loss, {"w": draw(16, 16)}, (draw(STEPS, 4, 16, scale=1.0),), {"w": (0.0026, 30)})


def used_64_times() -> Reuse:
    def loss(weights: Any, xs: list[jax.Array]) -> jax.Array:
        return jnp.mean(jnp.stack([x @ weights["w"] for x in xs]) ** 2)

    draw = Draw()
    xs = [draw(8, 16, scale=1.0) for _ in range(USES)]
    # The sum of 64 terms of random sign is not the worst that bfloat16 can do.
    return Reuse(loss, {"w": draw(16, 16)}, (xs,), {"w": (0.0021, 3)})


def bias_of_squares() -> Reuse:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ weights["w"] + weights["b"] - 3.0) ** 2)

    draw = Draw()
    weights = {"w": draw(8, 8), "b": draw(8, scale=0.1)}
    return Reuse(loss, weights, (draw(IDS, 8, scale=1.0),), {"b": (0.00105, 3)})


def bias_of_a_sum() -> Reuse:
    def loss(weights: Any, x: jax.Array, factors: jax.Array) -> jax.Array:
        return jnp.mean((x @ weights["w"] + weights["b"]) * factors)

    draw = Draw()
    weights = {"w": draw(8, 8), "b": draw(8, scale=0.1)}
    return Reuse(loss, weights, (draw(IDS, 8, scale=1.0), 1 + draw(IDS, 8, scale=0.3)), {"b": (3e-5, 40)})


def layer_norm() -> Reuse:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        h = x @ weights["w"]
        h = h - h.mean(-1, keepdims=True)
        h = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * weights["scale"] + weights["shift"]
        return jnp.mean((jnp.tanh(h) - 0.5) ** 2)

    draw = Draw()
    weights = {"w": draw(8, 8), "scale": 1 + draw(8, scale=0.1), "shift": draw(8, scale=0.1)}
    return Reuse(loss, weights, (draw(IDS, 8, scale=1.0),), {"shift": (0.002, 3), "scale": (0.0035, 1)})


REUSES = {
    make.__name__: cache(make)
    for make in (
        embedding_by_gather,
        embedding_by_one_hot,
        recurrent_net,
        sum_over_steps,
        used_64_times,
        bias_of_squares,
        bias_of_a_sum,
        layer_norm,
    )
}


@pytest.mark.parametrize("name", REUSES)
def test_the_gradient_of_a_weight_used_many_times_is_as_good_as_that_of_one_used_once(name: str) -> None:
    reuse = REUSES[name]()
    want, plain = reuse.expected
    got, jaxpr = reuse.gradients(jax.grad(autocast(reuse.loss, LOW)))
    check_dots(jaxpr, LOW, total=dots(plain).total())
    check_limits(reuse, got, want)


@pytest.mark.parametrize("name", ["embedding_by_gather", "used_64_times"])
def test_so_is_the_gradient_computed_inside_autocast(name: str) -> None:
    reuse = REUSES[name]()
    got, _ = reuse.gradients(autocast(jax.grad(reuse.loss), LOW))
    check_limits(reuse, got, reuse.expected[0])


def check_limits(reuse: Reuse, got: Any, want: Any) -> None:
    for name, (limit, worse) in reuse.limits.items():
        error, cast_once = (relative_error(grads[name], want[name]) for grads in (got, reuse.cast_once))
        assert got[name].dtype == jnp.float32
        assert error <= limit, name
        assert cast_once >= worse * error, name


def casts_of(jaxpr: Any, shape: tuple[int, ...], source: str, target: str) -> int:
    """Count the casts of arrays of one shape from one dtype to another."""
    return sum(
        eqn.primitive.name == "convert_element_type"
        and (eqn.invars[0].aval.shape, eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype) == (shape, source, target)
        for eqn in equations(jaxpr)
    )


def test_no_two_uses_of_a_weight_share_a_cast() -> None:
    reuse = REUSES["used_64_times"]()
    forward = jax.make_jaxpr(autocast(reuse.loss, LOW))(reuse.weights, *reuse.data)
    assert casts_of(forward, (16, 16), "float32", LOW) == USES
    backward = jax.make_jaxpr(jax.grad(autocast(reuse.loss, LOW)))(reuse.weights, *reuse.data)
    assert casts_of(backward, (16, 16), LOW, "float32") == USES
    sums = [eqn for eqn in equations(backward) if eqn.primitive.name == "add_any" and eqn.outvars[0].aval.ndim == 2]
    assert len(sums) == USES - 1
    assert {str(eqn.outvars[0].aval.dtype) for eqn in sums} == {"float32"}


def test_a_weight_is_cast_inside_a_scan_and_not_in_front_of_it() -> None:
    reuse = REUSES["recurrent_net"]()
    jaxpr = jax.make_jaxpr(autocast(reuse.loss, LOW))(reuse.weights, *reuse.data)
    (scan,) = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan")
    assert casts_of(jaxpr, (16, 16), "float32", LOW) == 2
    assert casts_of(scan.params["jaxpr"], (16, 16), "float32", LOW) == 2
