"""Autocast with shard_map, pmap and shardings, on eight host devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mezzo.jax import autocast

from .seen import BF16, F32, arrays, distance, dots, equations, of, signature

Fn = Callable[..., Any]

CLOSE = 2e-2

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


def mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


def parallel(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
    """A net of two layers, the hidden units spread over the devices."""
    return lax.psum(jnp.tanh(x @ w) @ v, "model")


def plain(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ v


SPECS = (P(None, "model"), P("model", None), P("data", None))


def sharded(fn: Fn, **options: Any) -> Fn:
    return jax.shard_map(fn, mesh=mesh(), in_specs=SPECS, out_specs=P("data", None), **options)


ORDERS: dict[str, Fn] = {
    "autocast(shard_map)": lambda **options: autocast(sharded(parallel, **options)),
    "shard_map(autocast)": lambda **options: sharded(autocast(parallel), **options),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("check", [True, False])
def test_a_shard_map_is_entered_and_reduces_over_its_axes(order: str, check: bool) -> None:
    args = arrays((4, 8), (8, 4), (4, 4))
    made = ORDERS[order](check_vma=check)
    assert dots(made, *args) == {BF16: 2}
    assert signature(made, *args) == signature(sharded(parallel), *args)
    (found,) = [eqn for eqn in equations(made, *args) if eqn.primitive.name == "shard_map"]
    assert found.params["check_vma"] is check
    assert distance(jax.jit(made)(*args), plain(*args)) < CLOSE


@pytest.mark.parametrize("order", [*ORDERS, "autocast(grad(shard_map))"])
def test_gradients_of_a_shard_map(order: str) -> None:
    args = arrays((4, 8), (8, 4), (4, 4))

    def loss(fn: Fn) -> Fn:
        return lambda *args: jnp.mean(fn(*args) ** 2)

    made = (
        jax.grad(loss(ORDERS[order]()), (0, 1))
        if order in ORDERS
        else autocast(jax.grad(loss(sharded(parallel)), (0, 1)))
    )
    assert set(dots(made, *args)) == {BF16}
    assert signature(made, *args) == signature(jax.grad(loss(sharded(parallel)), (0, 1)), *args)
    assert distance(jax.jit(made)(*args), jax.grad(loss(plain), (0, 1))(*args)) < 2 * CLOSE


def test_only_some_axes_of_a_mesh_are_manual() -> None:
    # Without a psum: XLA for CPUs aborts on a low one over some axes only, with or without autocast.
    w, x = arrays((4, 4), (4, 4))
    specs: dict[str, Any] = {
        "in_specs": (P(None, "model"), P()),
        "out_specs": P(None, "model"),
        "axis_names": {"model"},
    }
    plain_map = jax.shard_map(lambda w, x: jnp.tanh(x @ w), mesh=mesh(), **specs)
    made = autocast(plain_map)
    assert dots(made, w, x) == {BF16: 1}
    (before,), (after,) = (
        [eqn for eqn in equations(fn, w, x) if eqn.primitive.name == "shard_map"] for fn in (plain_map, made)
    )
    kept = [name for name in before.params if "axes" in name or "specs" in name or name == "mesh"]
    assert len(kept) >= 4
    assert {name: after.params[name] for name in kept} == {name: before.params[name] for name in kept}
    assert distance(jax.jit(made)(w, x), jnp.tanh(x @ w)) < CLOSE


def test_collectives_move_low_activations() -> None:
    def gathered(w: jax.Array, x: jax.Array) -> Any:
        y = x @ w
        return (
            lax.all_gather(y, "data", tiled=True).sum(),
            lax.psum_scatter(y, "data", tiled=True),
            lax.ppermute(y, "data", [(0, 1), (1, 0)]),
            lax.all_to_all(y, "data", 0, 1, tiled=True),
            lax.pmax(y, "data"),
        )

    specs = (P(), P("data"), P("data"), P("data"), P())
    w, x = arrays((4, 4), (8, 4))
    plain_map = jax.shard_map(gathered, mesh=mesh(), in_specs=(P(), P("data")), out_specs=specs, check_vma=False)
    made = autocast(plain_map)
    assert dots(made, w, x) == {BF16: 1}
    moved = ("all_gather", "reduce_scatter", "ppermute", "all_to_all", "pmax")
    for name in moved:
        assert of(name, made, w, x) == [("bfloat16", "bfloat16")], name
    assert signature(made, w, x) == signature(plain_map, w, x)
    assert distance(jax.jit(made)(w, x), jax.jit(plain_map)(w, x)) < CLOSE


def test_shardings_of_arguments_and_constraints_stay() -> None:
    where = NamedSharding(mesh(), P("data", "model"))

    def constrained(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(lax.with_sharding_constraint(x @ w, where))

    w, x = arrays((4, 4), (4, 4))
    x = jax.device_put(x, NamedSharding(mesh(), P("data", None)))
    made = jax.jit(autocast(constrained))
    assert dots(made, w, x) == {BF16: 1}
    assert of("sharding_constraint", made, w, x) == [("bfloat16", "bfloat16")]
    got = made(w, x)
    assert got.sharding.is_equivalent_to(where, 2)
    assert distance(got, jnp.tanh(x @ w)) < CLOSE


@pytest.mark.parametrize("constant", [None, np.eye(4, dtype=np.float32)], ids=["plain", "constant"])
def test_shardings_of_an_inner_function_stay(constant: Any) -> None:
    where = NamedSharding(mesh(), P("data", None))
    (x,) = arrays((4, 4))

    def scaled(x: jax.Array) -> jax.Array:
        return x @ x if constant is None else x @ x * constant

    made = jax.jit(autocast(jax.jit(scaled, out_shardings=where)))
    assert dots(made, x) == {BF16: 1}
    assert made(x).sharding.is_equivalent_to(where, 2)


def test_explicit_mesh_axes_stay_in_the_types() -> None:
    def net(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ w + 1.0)
        return jax.sharding.reshard(y, P(None, None)) * 2.0

    with jax.set_mesh(mesh(AxisType.Explicit)):
        w, x = arrays((4, 4), (4, 4))
        w, x = jax.device_put(w, P(None, "model")), jax.device_put(x, P("data", None))
        made = autocast(net)
        assert dots(made, w, x) == {BF16: 1}
        (dot,) = [eqn for eqn in equations(made, w, x) if eqn.primitive.name == "dot_general"]
        assert dot.outvars[0].aval.sharding.spec == P("data", "model")
        assert jax.eval_shape(made, w, x).sharding == jax.eval_shape(net, w, x).sharding
        grads = jax.jit(jax.grad(lambda w: jnp.sum(made(w, x) ** 2)))(w)
        want = jax.jit(jax.grad(lambda w: jnp.sum(net(w, x) ** 2)))(w)
        assert grads.sharding.spec == P(None, "model")
        assert distance(grads, want) < 2 * CLOSE


@pytest.mark.parametrize("order", ["pmap(autocast)", "autocast(pmap)"])
def test_pmap_with_a_mean_over_devices(order: str) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.pmean(x @ w, "devices")

    w, x = arrays((3, 3), (4, 2, 3))
    options: dict[str, Any] = {"axis_name": "devices", "in_axes": (None, 0), "devices": jax.devices()[:4]}
    made = jax.pmap(autocast(step), **options)
    if order == "autocast(pmap)":
        made = autocast(jax.pmap(step, **options))
    assert dots(made, w, x) == {BF16: 1}
    got = made(w, x)
    assert got.dtype == jnp.float32
    assert distance(got, jnp.broadcast_to((x @ w).mean(0), (4, 2, 3))) < CLOSE
    assert F32 not in dots(made, w, x)
