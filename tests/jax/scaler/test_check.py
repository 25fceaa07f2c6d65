"""`GradCheck`: Inf and NaN apart, in any tree and dtype, and one verdict for all members of a mapped axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mezzo.jax.grad_check import GradCheck
from mezzo.jax.scaler import GradScaler
from mezzo.jax.stepping import apply_if

FOUND = {"finite": (False, False), "inf": (True, False), "nan": (False, True), "both": (True, True)}
BAD = {"finite": [1.0, 2.0], "inf": [1.0, -jnp.inf], "nan": [jnp.nan, 1.0], "both": [jnp.nan, jnp.inf]}


def flags(check: GradCheck) -> tuple[bool, bool]:
    return bool(check.inf), bool(check.nan)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "float8_e5m2"])
def test_inf_and_nan_are_told_apart(kind: str, dtype: str) -> None:
    check = GradCheck.of({"good": jnp.ones(3), "looked at": [jnp.array(BAD[kind], dtype)]})
    assert flags(check) == FOUND[kind]
    assert bool(check.finite) == (kind == "finite")


def test_either_part_of_a_complex_number_counts() -> None:
    assert flags(GradCheck.of(jnp.complex64([complex(0, jnp.inf)]))) == FOUND["inf"]
    assert flags(GradCheck.of(jnp.complex64([complex(0, jnp.nan)]))) == FOUND["nan"]


@pytest.mark.parametrize(
    "grads",
    [None, {}, jnp.zeros((0, 3)), jnp.int32([7]), np.zeros(2, jax.dtypes.float0), jax.random.key(0), "text", 2.0],
    ids=["None", "empty tree", "no elements", "integers", "float0", "key", "text", "number"],
)
def test_what_has_no_floats_is_finite(grads: Any) -> None:
    assert flags(GradCheck.of(grads)) == FOUND["finite"]


def test_a_gradient_that_overflows_while_it_is_unscaled_is_seen() -> None:
    scaler = GradScaler.create(init_scale=2.0**-20)
    value, grads, check = scaler.value_and_grad(lambda w: (w * 2.0**100).sum() * 2.0**30)(jnp.array([2.0**-40]))
    assert bool(jnp.isfinite(value))
    assert bool(jnp.isinf(grads).all())
    assert flags(check) == FOUND["inf"]


def test_a_loss_that_is_not_finite_counts_only_through_its_gradients() -> None:
    _, _, check = GradScaler.create().value_and_grad(lambda w: w.sum() + jnp.inf)(jnp.ones(2))
    assert bool(check.finite)


# Members of an axis

SHARDS = {kind: jnp.stack([jnp.ones(2)] * 3 + [jnp.array(bad)]) for kind, bad in BAD.items()}


def mapped(how: str, function: Any) -> Any:
    """Map a function over 4 members of the axis "x"."""
    if how == "vmap":
        return jax.vmap(function, axis_name="x")
    if how == "pmap":
        return jax.pmap(function, axis_name="x", devices=jax.devices()[:4])
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    spec = PartitionSpec("x")

    def one(shard: Any) -> Any:
        return jax.tree.map(lambda flag: flag[None], function(shard[0]))

    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=how == "shard_map"))


@pytest.mark.parametrize("how", ["vmap", "pmap", "shard_map", "shard_map without check"])
def test_all_members_hear_of_what_one_of_them_found(how: str) -> None:
    agree = mapped(how, lambda shard: GradCheck.of(shard, "x"))
    alone = mapped(how, GradCheck.of)
    for kind, shards in SHARDS.items():
        check = agree(shards)
        assert (list(check.inf), list(check.nan)) == tuple([flag] * 4 for flag in FOUND[kind])
        assert list(alone(shards).finite) == [True, True, True, kind == "finite"]


def test_members_of_several_axes_agree() -> None:
    of = jax.vmap(jax.vmap(lambda leaf: GradCheck.of(leaf, ("x", "y")).nan, axis_name="x"), axis_name="y")
    assert bool(of(jnp.array([[1.0, 1.0], [1.0, jnp.nan]])).all())


def test_sharded_replicas_keep_one_scale_and_the_same_weights() -> None:
    """A training step in which one of four shards of the batch overflows."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    everywhere, split = PartitionSpec(), PartitionSpec("x")

    def step(weight: Any, scaler: GradScaler, x: Any) -> Any:
        _, grads, check = scaler.value_and_grad(lambda w: (x @ w).mean(), axis_name="x")(weight)
        grads = jax.lax.pmean(grads, "x")
        return apply_if(check, lambda weight: weight - grads, weight), scaler.update(check), check

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(everywhere, everywhere, split), out_specs=everywhere))
    x = jnp.ones((4, 2))
    weight, scaler, check = run(jnp.ones(2), GradScaler.create(init_scale=8.0), x)
    assert (float(scaler.scale), flags(check)) == (8.0, FOUND["finite"])
    assert bool((weight < 1).all())
    after, scaler, check = run(weight, scaler, x.at[2, 0].set(jnp.inf))
    assert (float(scaler.scale), flags(check)) == (4.0, FOUND["inf"])
    np.testing.assert_array_equal(after, weight)
