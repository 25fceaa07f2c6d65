"""The same call gives the same program; what is remembered between calls is never another function's."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mezzo.builtin import builtin_policy
from mezzo.jax import autocast, disabled

from .seen import BF16, F16, F32, arrays, dots, equations, of


def net(w: jax.Array, x: jax.Array) -> jax.Array:
    h = jax.nn.gelu(x @ w)
    h, _ = lax.scan(lambda h, _: (jax.nn.relu(h @ w), None), h, None, 3)
    return jax.nn.softmax(h).sum()


def test_the_same_call_gives_the_same_program() -> None:
    w, x = arrays((3, 3), (2, 3))
    made = jax.grad(autocast(net))
    first = str(jax.make_jaxpr(made)(w, x))
    assert "bf16" in first
    for _ in range(3):
        gc.collect()
        assert str(jax.make_jaxpr(made)(w, x)) == first
    assert str(jax.make_jaxpr(jax.grad(autocast(net)))(w, x)) == first


def test_a_call_twice_compiles_once_and_so_do_its_inner_functions() -> None:
    w, x = arrays((3, 3), (2, 3))
    traced: list[int] = []

    @jax.jit  # type: ignore[untyped-decorator]
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        traced.append(1)
        return jnp.tanh(x @ w)

    def deep(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = layer(w, x) + x
        return x

    made = jax.jit(autocast(deep))
    made(w, x)
    made(w + 1.0, x)
    assert len(traced) == 1
    assert made._cache_size() == 1  # type: ignore[attr-defined]
    inner = [eqn.params["jaxpr"] for eqn in equations(made, w, x) if eqn.params.get("name") == "layer"]
    assert len(inner) == 4
    # One for the input, which is stored as float32, one for the sums.
    assert len({id(jaxpr) for jaxpr in inner}) == 2


def numbers(fn: Any, *args: Any) -> list[float]:
    """List the literals of the products with numbers."""
    found = [eqn for eqn in equations(fn, *args) if eqn.primitive.name == "mul"]
    return [float(var.val) for eqn in found for var in eqn.invars if hasattr(var, "val")]


def multiplied(k: float) -> Any:
    """Make a function whose inner functions all multiply by one number."""
    inner = jax.jit(lambda x: (x @ x) * k)
    branch = jax.custom_jvp(lambda x: x * k)
    branch.defjvp(lambda primals, tangents: (primals[0], tangents[0]))

    def fresh(x: jax.Array) -> jax.Array:
        y = lax.cond(x[0, 0] > 0, lambda: branch(inner(x)), lambda: x * k)
        return lax.scan(lambda c, _: (jax.checkpoint(lambda c: c * k)(c), None), y, None, 2)[0]

    return fresh


def test_fresh_functions_in_a_loop_are_never_taken_for_one_another() -> None:
    (x,) = arrays((2, 2))
    for k in range(2, 24):
        fresh = multiplied(float(k))
        assert numbers(autocast(fresh), x) == [float(k)] * 4
        assert dots(autocast(fresh), x) == {BF16: 1}
        if k % 5 == 0:
            gc.collect()


def test_one_inner_function_under_many_settings() -> None:
    inner = jax.jit(lambda w, b, x: jnp.exp(x @ w + b))

    def outer(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        return inner(w, b, x)

    args = arrays((3, 3), (3,), (2, 3))
    exact = builtin_policy("default", framework="jax").override({"exp": "fallthrough"})
    wanted: list[tuple[dict[str, Any], tuple[str, ...], str, str]] = [
        ({}, BF16, "bfloat16", "float32"),
        ({"dtype": "float16"}, F16, "float16", "float32"),
        ({"bias": "promote"}, BF16, "float32", "float32"),
        ({"policy": exact}, BF16, "bfloat16", "bfloat16"),
        ({"policy": "fp32"}, F32, "float32", "float32"),
        ({"policy": exact, "dtype": "float16"}, F16, "float16", "float16"),
    ]
    for _ in range(2):
        for options, dot, add, exp in wanted:
            made = autocast(outer, **options)
            assert dots(made, *args) == {dot: 1}, options
            assert of("add", made, *args)[0][0] == add, options
            assert of("exp", made, *args)[0][0] == exp, options


def test_one_inner_function_with_operands_of_several_kinds() -> None:
    add = jax.jit(lambda a, b: a + b)

    def several(x: jax.Array, b: jax.Array) -> Any:
        y = x @ x
        with disabled():
            exact = add(y, b)
        return add(y, b), add(y, 2.0), add(y, 3.4e38), add(y, jnp.exp(b)), add(y, y), exact, add(y, b[None]), add(b, b)

    x, b = arrays((2, 2), (2,))
    found = [each[-1] for each in of("add", autocast(several, outputs="flow"), x, b)]
    assert sorted(found) == sorted(["float32"] * 4 + ["bfloat16"] * 4)
    results = [leaf.dtype.name for leaf in jax.eval_shape(autocast(several, outputs="flow"), x, b)]
    low, wide = "bfloat16", "float32"
    assert results == [low, low, wide, wide, low, wide, low, wide]


def test_constants_of_a_function_that_is_gone_are_let_go() -> None:
    (x,) = arrays((2, 2))

    def constant_of(transform: Any) -> weakref.ref[Any]:
        table = jnp.arange(4.0).reshape(2, 2) + 1.0
        made = transform(lambda x: x @ table)
        assert jax.make_jaxpr(made)(x)
        return weakref.ref(table)

    gc.collect()
    plain, cast = constant_of(lambda f: f), constant_of(autocast)
    gc.collect()
    assert plain() is None
    assert cast() is None


def test_eight_threads_with_settings_of_their_own() -> None:
    args = arrays((3, 3), (2, 3))
    settings: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({}, BF16),
        ({"dtype": "float16"}, F16),
        ({"policy": "fp32"}, F32),
        ({"enabled": False}, F32),
    ] * 2
    faults: list[Any] = []
    start = threading.Barrier(len(settings))

    def work(options: dict[str, Any], expected: tuple[str, ...]) -> None:
        try:
            start.wait(30)
            for _ in range(6):
                found = dots(autocast(net, **options), *args)
                if found != {expected: 2}:
                    faults.append((options, found))
        except Exception as error:
            faults.append((options, error))

    threads = [threading.Thread(target=work, args=each) for each in settings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_a_scope_of_one_thread_is_not_seen_by_another() -> None:
    args = arrays((3, 3), (2, 3))
    entered, looked = threading.Event(), threading.Event()
    inside: list[Any] = []

    def hold() -> None:
        def waits(w: jax.Array, x: jax.Array) -> jax.Array:
            with disabled():
                entered.set()
                looked.wait(30)
                return x @ w

        inside.append(dots(autocast(waits), *args))

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(30)
    assert dots(autocast(lambda w, x: x @ w), *args) == {BF16: 1}
    looked.set()
    thread.join()
    assert inside == [{F32: 1}]


@pytest.mark.parametrize("order", ["jit(autocast)", "autocast(jit)"])
def test_a_function_that_jax_has_traced_before_is_rewritten_all_the_same(order: str) -> None:
    jitted = jax.jit(net)
    w, x = arrays((3, 3), (2, 3))
    assert dots(jitted, w, x) == {F32: 2}
    assert dots(autocast(jitted) if order == "autocast(jit)" else jax.jit(autocast(jitted)), w, x) == {BF16: 2}
    assert dots(jitted, w, x) == {F32: 2}
