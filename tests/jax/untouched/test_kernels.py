"""Kernels, callbacks, linear algebra, bits and mutable arrays get exactly the dtypes that they were traced with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mezzo.jax import autocast
from tests.jax.transforms.seen import BF16, F32, arrays, distance, dots, dtypes, equations, of, signature

Fn = Callable[..., Any]

CLOSE = 2e-2


def test_a_pallas_kernel_is_not_entered() -> None:
    pl = pytest.importorskip("jax.experimental.pallas")

    def body(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        assert x_ref.dtype == y_ref.dtype == out_ref.dtype == jnp.float32
        out_ref[...] = x_ref[...] @ y_ref[...] + 1.0

    kernel = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32), interpret=True)

    def net(x: jax.Array, w: jax.Array) -> jax.Array:
        return kernel(x @ w, w) @ w

    x, w = arrays((8, 8), (8, 8))
    made = autocast(net)
    found = [eqn for eqn in equations(made, x, w) if eqn.primitive.name == "pallas_call"]
    assert [dtypes(eqn) for eqn in found] == [F32]
    assert dots(made, x, w)[BF16] == 2
    assert distance(jax.jit(made)(x, w), jax.jit(net)(x, w)) < CLOSE


def test_callbacks_get_the_traced_dtypes() -> None:
    seen: list[str] = []

    def host(y: Any) -> Any:
        seen.append(np.asarray(y).dtype.name)
        return np.asarray(y) * 2

    def net(x: jax.Array) -> jax.Array:
        y = x @ x
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        y = jax.pure_callback(host, shape, y)
        return jax.experimental.io_callback(host, shape, y, ordered=True) @ x

    (x,) = arrays((3, 3))
    made = autocast(net)
    assert dots(made, x) == {BF16: 2}
    for name in ("pure_callback", "io_callback"):
        assert [found[-2:] for found in of(name, made, x)] == [F32[:2]]
    got = jax.jit(made)(x)
    jax.effects_barrier()
    assert seen == ["float32", "float32"]
    assert distance(got, 4.0 * (x @ x) @ x) < CLOSE


def test_a_foreign_call_gets_the_traced_dtypes() -> None:
    def net(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("tests_not_registered", jax.ShapeDtypeStruct((3, 3), jnp.float32))(x @ x) @ x

    (x,) = arrays((3, 3))
    assert of("ffi_call", autocast(net), x) == [F32[:2]]
    assert dots(autocast(net), x) == {BF16: 2}


def spd(x: jax.Array) -> jax.Array:
    return x @ x.T + 4.0 * jnp.eye(x.shape[0])


SOLVERS: dict[str, Fn] = {
    "custom_linear_solve": lambda a, b: lax.custom_linear_solve(
        lambda v: a @ v, b, lambda _, b: jnp.linalg.solve(a, b), symmetric=True
    ),
    "cg": lambda a, b: jax.scipy.sparse.linalg.cg(a, b, tol=1e-6)[0],
    "solve": jnp.linalg.solve,
    "cho_solve": lambda a, b: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), b),
    "root": lambda a, b: lax.custom_root(
        lambda v: a @ v - b, jnp.zeros_like(b), lambda f, x: jnp.linalg.solve(a, b), lambda g, y: jnp.linalg.solve(a, y)
    ),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solution_is_as_good_as_without_autocast(name: str) -> None:
    def solve(a: jax.Array, b: jax.Array) -> jax.Array:
        return SOLVERS[name](a, b)

    x, b = arrays((4, 4), (4,))
    a = spd(x)
    made = autocast(lambda a, b: solve(a, b) @ a)
    assert dots(made, a, b)[BF16] >= 1
    # The product behind it is low: the solver itself is where tolerances are float32's.
    assert distance(jax.jit(autocast(solve))(a, b), jax.jit(solve)(a, b)) < (1e-5 if name != "root" else CLOSE)
    if name in ("custom_linear_solve", "solve"):
        grad = jax.jit(jax.grad(lambda b: jnp.sum(autocast(solve)(a, b) ** 2)))(b)
        assert distance(grad, jax.grad(lambda b: jnp.sum(solve(a, b) ** 2))(b)) < CLOSE


DECOMPOSITIONS: dict[str, tuple[str, Fn]] = {
    "cholesky": ("cholesky", jnp.linalg.cholesky),
    "eigh": ("eigh", lambda a: jnp.linalg.eigh(a)[0]),
    "svd": ("svd", lambda a: jnp.linalg.svd(a, compute_uv=False)),
    "qr": ("qr", lambda a: jnp.abs(jnp.linalg.qr(a)[1])),
    "lu": ("lu", lambda a: jnp.abs(jax.scipy.linalg.lu(a)[2])),
    "triangular_solve": ("triangular_solve", lambda a: jax.scipy.linalg.solve_triangular(a, a[0], lower=True)),
    "fft": ("fft", lambda a: jnp.abs(jnp.fft.rfft(a))),
    "det": ("lu", jnp.linalg.det),
}


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_linear_algebra_of_a_low_matrix_runs_in_float32(name: str) -> None:
    primitive, fn = DECOMPOSITIONS[name]

    def net(x: jax.Array) -> jax.Array:
        return fn(spd(x))

    (x,) = arrays((4, 4))
    made = autocast(net)
    assert BF16 in dots(made, x)
    found = [eqn for eqn in equations(made, x) if eqn.primitive.name.startswith(primitive)]
    assert found
    assert all(not {"bfloat16", "float16"} & set(dtypes(eqn)) for eqn in found)
    assert signature(made, x) == signature(net, x)
    assert distance(jax.jit(made)(x), jax.jit(net)(x)) < 3 * CLOSE


def test_bits_are_those_of_float32() -> None:
    def net(x: jax.Array) -> Any:
        y = x @ x
        bits = lax.bitcast_convert_type(y, jnp.int32)
        return bits, lax.reduce_precision(y, 8, 7), jnp.nextafter(y, 0.0), jnp.signbit(y), jnp.frexp(y)[1]

    (x,) = arrays((3, 3))
    made = autocast(net)
    assert dots(made, x) == {BF16: 1}
    assert of("bitcast_convert_type", made, x)[0] == ("float32", "int32")
    assert of("reduce_precision", made, x) == [F32[:2]]
    assert of("nextafter", made, x) == [F32]
    assert signature(made, x) == signature(net, x)
    low = jnp.asarray(jax.jit(autocast(lambda x: x @ x))(x))
    assert bool(jnp.all(jax.jit(made)(x)[0] == lax.bitcast_convert_type(low, jnp.int32)))


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no mutable arrays")
def test_mutable_arrays_keep_the_dtype_they_were_made_with() -> None:
    def net(x: jax.Array) -> Any:
        ref = jax.new_ref(x @ x)
        ref[0] += (x @ x)[1]
        ref[...] = ref[...] * 2.0
        return ref[...], jax.freeze(ref) if hasattr(jax, "freeze") else ref[0]

    (x,) = arrays((3, 3))
    made = autocast(net)
    assert dots(made, x) == {BF16: 2}
    assert signature(made, x) == signature(net, x)
    assert distance(jax.jit(made)(x), jax.jit(net)(x)) < CLOSE


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no mutable arrays")
@pytest.mark.parametrize("around", ["jit", "scan", "cond", "argument"])
def test_mutable_arrays_go_into_functions(around: str) -> None:
    def write(ref: Any, x: jax.Array) -> None:
        ref[...] += jnp.sum(x @ x)

    def net(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(jnp.float32(0))
        if around == "jit":
            jax.jit(write)(ref, x)
        elif around == "scan":
            lax.scan(lambda c, x: (c, write(ref, x)), None, x[None])
        elif around == "cond":
            lax.cond(x[0, 0] < 9.0, lambda: write(ref, x), lambda: None)
        else:
            write(ref, x)
        return ref[...] + jnp.sum(x @ x)

    (x,) = arrays((3, 3))
    made = autocast(net)
    assert dots(made, x)[BF16] >= 1
    assert distance(jax.jit(made)(x), jax.jit(net)(x)) < 3 * CLOSE


def test_generic_reductions_and_windows() -> None:
    def net(x: jax.Array) -> Any:
        y = x @ x
        return (
            lax.reduce_window(y, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID"),
            lax.reduce_window(y, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
            lax.reduce((y, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,)),
            lax.cumsum(y),
            lax.cummax(y),
        )

    (x,) = arrays((4, 4))
    made = autocast(net)
    assert dots(made, x) == {BF16: 1}
    assert of("reduce_window_max", made, x) == [BF16[:2]]
    assert of("reduce_window_sum", made, x) == [F32[:2]]
    assert of("cumsum", made, x) == [F32[:2]]
    assert of("cummax", made, x) == [BF16[:2]]
    assert set(of("reduce", made, x)[0]) == {"float32"}
    assert signature(made, x) == signature(net, x)
    assert distance(jax.jit(made)(x), jax.jit(net)(x)) < 3 * CLOSE
