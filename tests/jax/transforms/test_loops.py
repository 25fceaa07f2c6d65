"""Autocast of scan, fori_loop, map and associative_scan; their carries keep the traced dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mezzo.jax import autocast

from .seen import BF16, F32, arrays, distance, dots, equations, of, signature

Fn = Callable[..., Any]

# Four steps of a contracting net, each with one dot of operands rounded to 8 bits.
CLOSE = 3e-2


def rnn(w: jax.Array, xs: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ w + x)
        return h, h * 2.0

    return lax.scan(step, jnp.zeros(xs.shape[1]), xs, **options)


def scans(fn: Fn, *args: Any) -> list[Any]:
    return [eqn for eqn in equations(fn, *args) if eqn.primitive.name == "scan"]


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}, {"unroll": True}], ids=str)
def test_a_scan_is_entered_and_its_options_stay(options: dict[str, Any]) -> None:
    w, xs = arrays((3, 3), (4, 3))
    plain, made = (lambda w, xs: rnn(w, xs, **options)), autocast(lambda w, xs: rnn(w, xs, **options))
    assert dots(made, w, xs) == {BF16: 1}
    assert signature(made, w, xs) == signature(plain, w, xs)
    assert distance(jax.jit(made)(w, xs), jax.jit(plain)(w, xs)) < CLOSE
    (before,), (after,) = scans(plain, w, xs), scans(made, w, xs)
    for name in ("reverse", "unroll", "length", "num_carry"):
        assert after.params[name] == before.params[name]


@pytest.mark.parametrize("order", ["grad(autocast)", "autocast(grad)"])
def test_the_gradient_of_a_scan_is_low_and_right(order: str) -> None:
    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        return jnp.sum(rnn(w, xs)[1] ** 2)

    w, xs = arrays((3, 3), (4, 3))
    made = jax.grad(autocast(loss)) if order == "grad(autocast)" else autocast(jax.grad(loss))
    assert set(dots(made, w, xs)) == {BF16}
    assert dots(made, w, xs).total() == dots(jax.grad(loss), w, xs)[F32] >= 3
    assert distance(jax.jit(made)(w, xs), jax.jit(jax.grad(loss))(w, xs)) < 2 * CLOSE


def test_a_carry_of_zeros_is_kept_in_float32() -> None:
    w, xs = arrays((3, 3), (4, 3))
    (found,) = scans(autocast(rnn), w, xs)
    carry = found.params["jaxpr"].in_avals[found.params["num_consts"]]
    assert carry.dtype == jnp.float32


def accumulate(w: jax.Array, xs: jax.Array) -> jax.Array:
    return lax.scan(lambda total, x: (total + x @ w, None), jnp.zeros(3), xs)[0]


def test_a_running_sum_is_pinned_to_float32_and_stays_accurate() -> None:
    w, (xs,) = jnp.ones((3, 3)) / 3, arrays((1000, 3))
    xs = jnp.abs(xs)
    want = jax.jit(accumulate)(w, xs)
    assert dots(autocast(accumulate), w, xs) == {BF16: 1}
    # The sum itself is rounded in float32 only; each of its terms to 8 bits, and their errors cancel in part.
    assert distance(jax.jit(autocast(accumulate))(w, xs), want) < 3e-3


def test_the_fixpoint_of_an_explicitly_low_carry_is_low() -> None:
    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.maximum(h @ jnp.ones((3, 3), jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32), None

    def low_start(x: jax.Array, xs: jax.Array) -> jax.Array:
        start = (x @ x).astype(jnp.float32)
        return lax.scan(lambda h, x: (jnp.maximum(h @ jnp.ones((3, 3)), x), None), start, xs)[0]

    x, xs = arrays((3, 3), (4, 3))
    for carry, dtype in (("pin", "float32"), ("fixpoint", "bfloat16")):
        made = autocast(low_start, carry=carry, outputs="flow")
        (found,) = scans(made, x, xs)
        assert found.params["jaxpr"].in_avals[found.params["num_consts"]].dtype == dtype
        assert dots(made, x, xs) == {BF16: 2}
        assert jax.eval_shape(made, x, xs).dtype == dtype


def test_a_fixpoint_type_checks_where_the_body_lifts_its_carry() -> None:
    def lifted(x: jax.Array, xs: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            a, b = carry
            return (b, jnp.exp(a @ a) * x), None  # the second carry is float32 after a step, the first after two

        return lax.scan(step, (x @ x, x @ x), xs)[0][0]

    x, xs = arrays((2, 2), (3,))
    x = x / 4
    made = autocast(lifted, carry="fixpoint")
    (found,) = scans(made, x, xs)
    consts = found.params["num_consts"]
    assert [aval.dtype.name for aval in found.params["jaxpr"].in_avals[consts : consts + 2]] == ["float32"] * 2
    assert signature(made, x, xs) == signature(lifted, x, xs)
    assert distance(jax.jit(made)(x, xs), jax.jit(lifted)(x, xs)) < CLOSE


def test_a_static_fori_loop_is_entered_and_a_dynamic_one_is_not() -> None:
    def loop(w: jax.Array, h: jax.Array, steps: Any) -> jax.Array:
        return lax.fori_loop(0, steps, lambda _, h: jnp.tanh(h @ w), h)

    w, h = arrays((3, 3), (2, 3))
    static = autocast(lambda w, h: loop(w, h, 3))
    assert dots(static, w, h) == {BF16: 1}
    assert dots(autocast(loop), w, h, jnp.int32(3)) == {F32: 1}
    assert dots(autocast(loop, while_="body"), w, h, jnp.int32(3)) == {BF16: 1}
    want = jax.jit(loop)(w, h, 3)
    assert distance(jax.jit(static)(w, h), want) < CLOSE
    assert distance(jax.jit(autocast(loop, while_="body"))(w, h, 3), want) < CLOSE


def test_weights_scanned_over_are_cast_in_the_body_and_not_before() -> None:
    def layers(ws: jax.Array, h: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0]

    ws, h = arrays((4, 3, 3), (2, 3))
    assert dots(autocast(layers), ws, h) == {BF16: 1}
    # A cast hoisted out of the loop would sum the gradients of all uses in bfloat16.
    outside = jax.make_jaxpr(autocast(layers))(ws, h)
    assert "convert_element_type" not in [eqn.primitive.name for eqn in outside.jaxpr.eqns]
    assert "convert_element_type" in [eqn.primitive.name for eqn in equations(autocast(layers), ws, h)]


def test_a_weight_closed_over_by_a_body_sums_its_gradient_in_float32() -> None:
    w, xs = arrays((3, 3), (4, 3))
    (backward,) = [
        eqn for eqn in scans(jax.grad(lambda w: jnp.sum(autocast(rnn)(w, xs)[1])), w) if eqn.params["reverse"]
    ]
    carries = backward.params["jaxpr"].out_avals[: backward.params["num_carry"]]
    assert {aval.dtype.name for aval in carries} == {"float32"}
    assert (3, 3) in [aval.shape for aval in carries]


@pytest.mark.parametrize("batch", [None, 2])
def test_lax_map_is_entered(batch: int | None) -> None:
    def mapped(w: jax.Array, xs: jax.Array) -> jax.Array:
        return lax.map(lambda x: x @ w, xs, batch_size=batch)

    w, xs = arrays((3, 3), (4, 3))
    assert set(dots(autocast(mapped), w, xs)) == {BF16}
    assert signature(autocast(mapped), w, xs) == signature(mapped, w, xs)
    assert distance(jax.jit(autocast(mapped))(w, xs), xs @ w) < 1e-2


def test_an_associative_scan_of_products_is_low_and_right() -> None:
    def products(ms: jax.Array) -> jax.Array:
        return lax.associative_scan(jnp.matmul, ms)

    (ms,) = arrays((5, 2, 2))
    found = dots(autocast(products), ms)
    assert set(found) == {BF16}
    assert found.total() == dots(products, ms)[F32]
    assert signature(autocast(products), ms) == signature(products, ms)
    assert distance(jax.jit(autocast(products))(ms), jax.jit(products)(ms)) < CLOSE


def test_a_custom_reduction_runs_in_the_traced_dtype() -> None:
    def reduced(x: jax.Array) -> jax.Array:
        return lax.reduce(x @ x, jnp.float32(0), lambda a, b: a + b * jnp.float32(1), (0,))

    (x,) = arrays((4, 4))
    assert dots(autocast(reduced), x) == {BF16: 1}
    assert of("reduce", autocast(reduced), x) == [F32]
    assert distance(jax.jit(autocast(reduced))(x), jax.jit(reduced)(x)) < CLOSE


def test_a_scan_in_a_scan_with_xs_of_several_kinds() -> None:
    def nested(w: jax.Array, xs: jax.Array, ids: jax.Array, keys: jax.Array) -> Any:
        def inner(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(h @ w + x), h

        def outer(carry: tuple[jax.Array, jax.Array], row: dict[str, jax.Array]) -> Any:
            h, count = carry
            h, ys = lax.scan(inner, h, xs)
            return (h, count + row["id"]), {"y": ys, "noise": jax.random.normal(row["key"]), "id": row["id"]}

        return lax.scan(outer, (jnp.zeros(3), jnp.int32(0)), {"id": ids, "key": keys})

    w, xs = arrays((3, 3), (2, 3))
    args = (w, xs, jnp.arange(2), jax.random.split(jax.random.key(0), 2))
    made = autocast(nested)
    assert dots(made, *args) == {BF16: 1}
    assert signature(made, *args) == signature(nested, *args)
    got, want = jax.jit(made)(*args), jax.jit(nested)(*args)
    assert got[0][1] == want[0][1] == 1
    assert distance(got[1]["y"], want[1]["y"]) < CLOSE
