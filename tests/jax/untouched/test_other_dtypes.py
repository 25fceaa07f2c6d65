"""float64, complex, integers, booleans, keys and 8-bit floats are left as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from mezzo.jax import autocast
from tests.jax.transforms.seen import BF16, F32, arrays, distance, dots, dtypes, equations, of, signature

Fn = Callable[..., Any]

LOW = ("bfloat16", "float16")


def same_program(fn: Fn, *args: Any) -> bool:
    """Say whether autocast changes anything about a function."""
    return str(jax.make_jaxpr(autocast(fn))(*args)) == str(jax.make_jaxpr(fn)(*args))


def lowered(fn: Fn, *args: Any) -> set[str]:
    """Name the primitives that have an operand or a result in lower precision."""
    return {eqn.primitive.name for eqn in equations(fn, *args) if set(dtypes(eqn)) & set(LOW)}


def test_float64_is_never_touched() -> None:
    with jax.enable_x64(True):
        x = jnp.arange(9.0).reshape(3, 3)
        assert x.dtype == jnp.float64

        def net(x: jax.Array) -> Any:
            y = jnp.tanh(x @ x + 1.0)
            h, _ = lax.scan(lambda h, _: (jax.nn.relu(h @ x), None), y, None, 2)
            return h.sum(), lax.cond(x[0, 0] > 0, lambda: h, lambda: jnp.exp(h)), jax.nn.softmax(y)

        assert lowered(autocast(net), x) == set()
        assert dots(autocast(net), x) == {("float64",) * 3: 2}
        got, want = jax.jit(autocast(net))(x), jax.jit(net)(x)
        assert all(bool(jnp.all(a == b)) for a, b in zip(got, want, strict=True))


def test_float64_beside_float32_lifts_it_and_the_rest_stays_low() -> None:
    with jax.enable_x64(True):
        wide = jnp.ones((3, 3), jnp.float64)
        x = jnp.ones((3, 3), jnp.float32)
        made = autocast(lambda x, wide: ((x @ x) @ wide, (x @ x) * wide, x @ x))
        plain = dots(lambda y, wide: y @ wide, x, wide)
        assert "float64" in next(iter(plain))
        assert dots(made, x, wide) == {BF16: 3, **plain}
        assert signature(made, x, wide) == signature(made.__wrapped__, x, wide)  # type: ignore[attr-defined]
        mixed = dots(autocast(lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float64)), x, x)
        assert mixed == {("float32", "float32", "float64"): 1}


def test_complex_numbers_are_never_touched() -> None:
    def net(z: jax.Array) -> Any:
        return z @ z * 2.0, jnp.exp(z), jnp.conj(z).real, jnp.abs(z) + 1.0, z.sum()

    (x,) = arrays((3, 3))
    z = lax.complex(x, x.T)
    assert lowered(autocast(net), z) == set()
    assert dots(autocast(net), z) == {("complex64",) * 3: 1}
    assert distance(np.asarray(jax.jit(autocast(net))(z)[2]), np.asarray(x)) == 0.0


def test_a_low_activation_that_becomes_complex_is_float32_there() -> None:
    def spectrum(x: jax.Array) -> jax.Array:
        y = x @ x
        return jnp.fft.ifft(jnp.fft.fft(y) * lax.complex(y, y)).real

    (x,) = arrays((4, 4))
    made = autocast(spectrum)
    assert dots(made, x) == {BF16: 1}
    assert of("complex", made, x) == [("float32", "float32", "complex64")]
    assert distance(jax.jit(made)(x), jax.jit(spectrum)(x)) < 2e-2


def test_integers_and_booleans_give_the_same_program() -> None:
    def count(ids: jax.Array, flags: jax.Array) -> Any:
        onehot = ids[:, None] == jnp.arange(4)
        sums = lax.scan(lambda c, i: (c + i, c * 2), jnp.int32(0), ids)
        return ids @ ids, jnp.cumsum(ids), onehot.sum(0), sums, lax.population_count(ids), ~flags | flags, ids // 3

    args = (jnp.array([3, 1, 2]), jnp.array([True, False]))
    assert same_program(count, *args)


def test_indices_computed_beside_low_activations_stay_integers() -> None:
    def pick(x: jax.Array, ids: jax.Array) -> Any:
        y = x @ x
        return y[ids], jnp.argmax(y, -1), jnp.take_along_axis(y, ids[:, None], 1), lax.top_k(y, 2), y.at[ids].add(1.0)

    (x,) = arrays((3, 3))
    ids = jnp.array([2, 0, 1])
    made = autocast(pick)
    assert dots(made, x, ids) == {BF16: 1}
    assert signature(made, x, ids) == signature(pick, x, ids)
    got, want = jax.jit(made)(x, ids), jax.jit(pick)(x, ids)
    assert distance(got[0], want[0]) < 2e-2
    assert bool(jnp.all(got[1] == want[1]))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_numbers_are_the_same_to_the_bit(impl: str) -> None:
    def sample(key: jax.Array, x: jax.Array) -> Any:
        a, b = jax.random.split(jax.random.fold_in(key, 7))
        return (
            (x @ x).sum(),
            jax.random.bits(a, (3,)),
            jax.random.key_data(b),
            jax.random.uniform(b, (4,)),
        )

    (x,) = arrays((3, 3))
    key = jax.random.key(3, impl=impl)
    made = autocast(sample)
    assert dots(made, key, x) == {BF16: 1}
    got, want = jax.jit(made)(key, x), jax.jit(sample)(key, x)
    assert all(bool(jnp.all(a == b)) for a, b in zip(got[1:], want[1:], strict=True))


def test_old_style_keys_and_dropout_masks_too() -> None:
    def dropout(key: jax.Array, x: jax.Array) -> Any:
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(keep, x @ x / 0.5, 0.0), keep

    (x,) = arrays((4, 4))
    key = jax.random.PRNGKey(1)
    made = autocast(dropout, outputs="flow")
    assert jax.eval_shape(made, key, x)[0].dtype == jnp.bfloat16
    got, want = jax.jit(made)(key, x), jax.jit(dropout)(key, x)
    assert bool(jnp.all(got[1] == want[1]))


EIGHT = [dtype for dtype in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz") if hasattr(jnp, dtype)]
FOUR = [dtype for dtype in ("float4_e2m1fn",) if hasattr(jnp, dtype)]


@pytest.mark.parametrize("dtype", [*EIGHT, *FOUR])
def test_products_of_small_floats_are_left_alone(dtype: str) -> None:
    def net(x: jax.Array) -> jax.Array:
        y = x @ x
        small = y.astype(dtype)
        return lax.dot(small, small, preferred_element_type=jnp.float32) + lax.dot(
            small, small, preferred_element_type=jnp.bfloat16
        )

    (x,) = arrays((4, 4))
    assert dots(autocast(net), x) == {BF16: 1, (dtype, dtype, "float32"): 1, (dtype, dtype, "bfloat16"): 1}


@pytest.mark.parametrize("dtype", EIGHT)
def test_a_small_float_beside_a_low_one_is_left_alone(dtype: str) -> None:
    small = jnp.ones((3, 3), dtype)
    (x,) = arrays((3, 3))
    made = autocast(lambda x, small: lax.dot(x, small, preferred_element_type=jnp.float32) + x @ x)
    assert dots(made, x, small) == {("float32", dtype, "float32"): 1, BF16: 1}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "int16"])
def test_integer_products_are_left_alone(dtype: str) -> None:
    ints = jnp.ones((3, 3), dtype)
    fn = lambda a: lax.dot(a, a, preferred_element_type=jnp.int32)  # noqa: E731
    assert same_program(fn, ints)
    assert dots(autocast(fn), ints) == {(dtype, dtype, "int32"): 1}


def test_a_product_of_floats_with_int8_weights_is_left_alone() -> None:
    (x,) = arrays((3, 3))
    weights = jnp.ones((3, 3), jnp.int8)
    made = autocast(
        lambda x, q: (lax.dot_general(x, q, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32), x @ x)
    )
    assert dots(made, x, weights) == {("float32", "int8", "float32"): 1, BF16: 1}
    # Dequantized by hand, it is a product like any other.
    dequantized = autocast(lambda x, q: x @ (q.astype(jnp.float32) * 0.1))
    assert dots(dequantized, x, weights) == {BF16: 1}


def test_numbers_of_small_dtypes_pass_through_structure() -> None:
    small = jnp.asarray(np.arange(4), ml_dtypes.float8_e4m3fn)
    assert same_program(lambda s: (s[::-1].reshape(2, 2).T, jnp.concatenate([s, s]), s.astype(jnp.float32)), small)


def test_float32_that_meets_no_product_stays_float32() -> None:
    def plain(x: jax.Array) -> Any:
        return jnp.exp(x).sum(), x * 2.0 + 1.0, jnp.sort(x), jnp.where(x > 0, x, 0.0), x.reshape(-1)

    (x,) = arrays((3, 3))
    assert lowered(autocast(plain), x) == set()
    assert of("mul", autocast(plain), x) == [F32]
