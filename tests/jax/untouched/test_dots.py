"""Products that say themselves in which precision they want to be computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mezzo.jax import autocast
from tests.jax.transforms.seen import BF16, DOTS, F16, F32, arrays, distance, dots, equations

ASKED: list[Any] = [
    lax.Precision.HIGH,
    lax.Precision.HIGHEST,
    "highest",
    "float32",
    (lax.Precision.DEFAULT, lax.Precision.HIGHEST),
    lax.DotAlgorithmPreset.F32_F32_F32,
    lax.DotAlgorithmPreset.BF16_BF16_F32,
    lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32, 1, 1, 1, allow_imprecise_accumulation=False),
]


@pytest.mark.parametrize("precision", ASKED, ids=str)
def test_a_precision_that_was_asked_for_is_kept(precision: Any) -> None:
    def both(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot(x @ w, w, precision=precision)

    x, w = arrays((2, 3), (3, 3))
    made = autocast(both)
    assert dots(made, x, w) == {BF16: 1, F32: 1}
    before, after = (
        [eqn.params["precision"] for eqn in equations(fn, x, w) if eqn.primitive.name in DOTS] for fn in (both, made)
    )
    assert after == before
    # So are those of its gradient.
    assert dots(jax.grad(lambda w: jnp.sum(made(x, w))), w)[F32] == 3


@pytest.mark.parametrize("precision", [None, "default", lax.Precision.DEFAULT], ids=str)
def test_the_default_precision_is_no_wish(precision: Any) -> None:
    x, w = arrays((2, 3), (3, 3))
    assert dots(autocast(lambda x, w: jnp.matmul(x, w, precision=precision)), x, w) == {BF16: 1}


@pytest.mark.parametrize("precision", [None, lax.Precision.HIGHEST], ids=str)
def test_convolutions_and_ragged_products(precision: Any) -> None:
    x, k, rows, experts = arrays((1, 5, 5, 2), (3, 3, 2, 4), (4, 3), (2, 3, 5))
    sizes = jnp.array([1, 3], jnp.int32)

    def conv(x: jax.Array, k: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=precision
        )

    def ragged(rows: jax.Array, experts: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot(rows, experts, sizes, precision=precision)

    expected = BF16 if precision is None else F32
    assert dots(autocast(conv), x, k) == {expected: 1}
    assert set(dots(jax.grad(lambda k: jnp.sum(autocast(conv)(x, k))), k)) == {expected}
    (found,) = dots(autocast(ragged), rows, experts, sizes)
    assert {found[0], found[1], found[-1]} == {expected[0]}
    if precision is None:
        assert distance(jax.jit(autocast(conv))(x, k), jax.jit(conv)(x, k)) < 2e-2
        assert distance(jax.jit(autocast(ragged))(rows, experts, sizes), jax.jit(ragged)(rows, experts, sizes)) < 2e-2


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_operands_the_user_made_low_keep_their_accumulation(low: str) -> None:
    x, w = arrays((2, 3), (3, 3))

    def own(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot(x.astype(low), w.astype(low), preferred_element_type=jnp.float32)

    # With autocast in the same dtype and in the other one.
    for around in ("bfloat16", "float16"):
        made = autocast(own, dtype=around)
        assert dots(made, x, w) == {(low, low, "float32"): 1}
        assert str(jax.make_jaxpr(made)(x, w)) == str(jax.make_jaxpr(own)(x, w))


def test_a_result_dtype_traced_as_float32_is_rewritten_with_the_operands() -> None:
    x, w = arrays((2, 3), (3, 3))

    def net(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("ij,jk->ik", x, w, preferred_element_type=jnp.float32)

    made = autocast(net)
    assert dots(made, x, w) == {BF16: 1}
    # Left at float32, these would be products of a float32 and a bfloat16 operand.
    assert dots(jax.grad(lambda x, w: jnp.sum(made(x, w) ** 2), (0, 1)), x, w) == {BF16: 3}
    assert dots(autocast(net, dtype="float16"), x, w) == {F16: 1}


def test_one_low_and_one_wide_operand_are_both_low() -> None:
    x, w = arrays((2, 3), (3, 3))
    half = x.astype(jnp.float16)
    assert dots(autocast(lambda half, w: half @ w), half, w) == {BF16: 1}
    assert dots(autocast(lambda half, w: half @ w, dtype="float16"), half, w) == {F16: 1}
    mixed = autocast(
        lambda half, w: lax.dot_general(half, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    )
    assert dots(mixed, half, w) == {BF16: 1}


def test_einsum_tensordot_and_their_batches_are_low() -> None:
    q, k = arrays((2, 4, 3, 5), (2, 4, 3, 5))

    def attention(q: jax.Array, k: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(jnp.einsum("bhid,bhjd->bhij", q, k))
        return jnp.tensordot(jnp.vecdot(weights @ k, q), jnp.ones((3, 2)), 1)

    made = autocast(attention)
    assert dots(made, q, k) == {BF16: 4}
    assert distance(jax.jit(made)(q, k), jax.jit(attention)(q, k)) < 2e-2


def test_attention_of_jax_itself() -> None:
    q, k, v = arrays((1, 4, 2, 3), (1, 4, 2, 3), (1, 4, 2, 3))

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    for low, tolerance in (("bfloat16", 2e-2), ("float16", 3e-3)):
        made = autocast(attention, dtype=low)
        assert dots(made, q, k, v) == {(low,) * 3: 2}
        assert distance(jax.jit(made)(q, k, v), jax.jit(attention)(q, k, v)) < tolerance
