"""Autocast ahead of time: lower and compile, export, donation, and what the compiled text says about the source."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from mezzo.jax import autocast

from .seen import BF16, F32, arrays, distance, dots, equations, of

Fn = Callable[..., Any]

CLOSE = 2e-2


def net(w: jax.Array, x: jax.Array) -> jax.Array:
    with jax.named_scope("first_layer"):
        hidden = jnp.tanh(x @ w)
    return hidden @ w.T + 1.0


ORDERS: dict[str, Fn] = {
    "jit(autocast)": lambda f: jax.jit(autocast(f)),
    "autocast(jit)": lambda f: jax.jit(autocast(jax.jit(f))),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_lowered_and_compiled_function_has_low_dots(order: str) -> None:
    w, x = arrays((3, 3), (2, 3))
    abstract = jax.ShapeDtypeStruct(w.shape, w.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)
    lowered = ORDERS[order](net).lower(*abstract)
    text = lowered.as_text()
    assert text.count("stablehlo.dot_general") == 2
    assert all("bf16" in line and "f32" not in line for line in text.splitlines() if "dot_general" in line)
    assert lowered.out_info.dtype == jnp.float32
    assert distance(lowered.compile()(w, x), net(w, x)) < CLOSE


@pytest.mark.parametrize("through", ["memory", "bytes"])
def test_an_exported_function_is_low_inside_and_has_its_gradient(through: str) -> None:
    w, x = arrays((3, 3), (2, 3))
    read = export.export(jax.jit(autocast(net)))(w, x)
    if through == "bytes":
        pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to write bytes")
        read = export.deserialize(read.serialize(vjp_order=1))
    assert [aval.dtype.name for aval in read.out_avals] == ["float32"]
    assert "bf16" in read.mlir_module()
    assert distance(read.call(w, x), net(w, x)) < CLOSE
    grads = jax.grad(lambda w: jnp.sum(read.call(w, x) ** 2))(w)
    assert distance(grads, jax.grad(lambda w: jnp.sum(net(w, x) ** 2))(w)) < 2 * CLOSE


def test_shapes_may_be_symbols() -> None:
    def pooled(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w + b)
        h = jnp.where(h > -1e9, h, -1e9) / x.shape[0]
        return jnp.concatenate([h.reshape(-1), jnp.zeros(2)])

    w, b, x = arrays((3, 3), (3,), (5, 3))
    rows = export.symbolic_shape("rows")[0]
    shapes = (*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (w, b)), jax.ShapeDtypeStruct((rows, 3), jnp.float32))
    exported = export.export(jax.jit(autocast(pooled)))(*shapes)
    assert str(exported.out_avals[0].shape[0]) == "3*rows + 2"
    assert dots(autocast(pooled), w, b, x) == {BF16: 1}
    # The bias adapts whatever the number of rows may be.
    assert of("add", autocast(pooled), w, b, x)[0] == BF16
    assert "tensor<?x3xbf16>" in exported.mlir_module()
    assert distance(exported.call(w, b, x), pooled(w, b, x)) < CLOSE


def test_an_exported_function_called_inside_is_opaque() -> None:
    w, x = arrays((3, 3), (3, 3))
    inner = export.export(jax.jit(net))(w, x)
    made = autocast(lambda w, x: inner.call(w, x @ w))
    assert of("call_exported", made, w, x) == [F32]
    assert dots(made, w, x) == {BF16: 1}
    assert distance(jax.jit(made)(w, x), net(w, x @ w)) < CLOSE


@pytest.mark.parametrize("order", ORDERS)
def test_scopes_and_source_lines_are_in_the_compiled_text(order: str) -> None:
    w, x = arrays((3, 3), (2, 3))
    text = ORDERS[order](net).lower(w, x).as_text(debug_info=True)
    assert "first_layer" in text
    assert "test_compiled.py" in text
    from jax.extend import source_info_util

    first = inspect.getsourcelines(net)[1]
    found = [eqn for eqn in equations(autocast(net), w, x) if eqn.primitive.name == "dot_general"]
    lines = [source_info_util.summarize(eqn.source_info) for eqn in found]
    assert [f":{first + 2}" in lines[0], f":{first + 3}" in lines[1]] == [True, True], lines
    assert all("first_layer" in str(eqn.source_info.name_stack) for eqn in found[:1])


def test_donated_arguments_are_donated() -> None:
    def update(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    w, x = arrays((3, 3), (2, 3))
    want = update(w, x)
    made = jax.jit(autocast(update), donate_argnums=0)
    assert dots(made, w, x)[BF16] >= 2
    got = made(w, x)
    assert w.is_deleted()
    assert not x.is_deleted()
    assert distance(got, want) < CLOSE


def test_static_arguments_of_jit_reach_the_function_as_they_are() -> None:
    def repeated(w: jax.Array, *, times: int, name: str) -> jax.Array:
        assert (type(times), name) == (int, "n")
        for _ in range(times):
            w = w @ w
        return w

    (w,) = arrays((3, 3))
    made = jax.jit(autocast(repeated), static_argnames=("times", "name"))
    for times in (1, 3):
        assert dots(lambda w: made(w, times=times, name="n"), w) == {BF16: times}


@pytest.mark.parametrize(
    "constant", [np.eye(3, dtype=np.float32), np.arange(9, dtype=np.int32).reshape(3, 3)], ids=["float", "int"]
)
def test_an_inner_function_keeps_its_name_and_donation(constant: np.ndarray) -> None:
    def inner(x: jax.Array) -> jax.Array:
        return x @ x * constant

    def outer(x: jax.Array) -> jax.Array:
        return jax.jit(inner, donate_argnums=0)(x + 1.0)

    (x,) = arrays((3, 3))
    assert dots(autocast(outer), x) == {BF16: 1}
    before, after = (
        [eqn for eqn in equations(fn, x) if eqn.primitive.name in ("jit", "pjit") and "name" in eqn.params]
        for fn in (outer, autocast(outer))
    )
    assert [eqn.params["name"] for eqn in after] == [eqn.params["name"] for eqn in before] == ["inner"]
    assert [any(eqn.params["donated_invars"]) for eqn in after] == [True]


def test_a_platform_dependent_branch_is_lowered_for_each_platform() -> None:
    def chosen(w: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(w @ w, cpu=lambda y: y @ w, default=lambda y: y * 2.0)

    (w,) = arrays((3, 3))
    made = jax.jit(autocast(chosen))
    assert dots(made, w) == {BF16: 2}
    assert distance(made(w), w @ w @ w) < CLOSE
