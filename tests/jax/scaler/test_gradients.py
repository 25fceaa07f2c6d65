"""Scaling a loss, unscaling gradients, and `value_and_grad`: dtypes, values, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mezzo.errors import ScalingError
from mezzo.jax.scaler import GradScaler

LARGE = GradScaler.create(init_scale=2.0**20)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_a_loss_is_scaled_in_float32(dtype: Any) -> None:
    scaled = LARGE.scale_loss(dtype(3.0))
    assert scaled.dtype == jnp.float32
    assert float(scaled) == 3.0 * 2.0**20  # more than float16 holds


def test_gradients_are_unscaled_in_float32_or_wider_and_all_else_stays() -> None:
    with jax.enable_x64(True):
        tiny = 2.0**-20  # times 2**-20 it is far below what float16 holds
        grads = {
            "half": jnp.float16([tiny]),
            "brain": jnp.bfloat16([tiny]),
            "eight": jnp.array([2.0**-6], jnp.float8_e4m3fn),
            "single": jnp.float32([tiny]),
            "double": jnp.float64([1 / 3]),
            "complex": jnp.complex64([complex(tiny, -tiny)]),
            "wide": jnp.complex128([complex(1 / 3, 1)]),
            "number": 1.0,
            "count": jnp.int32([7]),
            "none": None,
            "nothing": np.zeros(2, jax.dtypes.float0),
            "key": jax.random.key(0),
        }
        found = LARGE.unscale(grads)
        assert {name: found[name].dtype.name for name in ("half", "brain", "eight", "single", "double", "wide")} == {
            **dict.fromkeys(("half", "brain", "eight", "single"), "float32"),
            "double": "float64",
            "wide": "complex128",
        }
        for name in ("half", "brain", "single"):
            assert float(found[name][0]) == 2.0**-40
        assert float(found["eight"][0]) == 2.0**-26
        assert float(found["double"][0]) == 1 / 3 / 2**20
        assert complex(found["complex"][0]) == complex(2.0**-40, -(2.0**-40))
        assert complex(found["wide"][0]) == complex(1 / 3 / 2**20, 2.0**-20)
        assert float(found["number"]) == 2.0**-20
        for name in ("count", "none", "nothing", "key"):
            assert found[name] is grads[name]


@pytest.mark.parametrize("scale", [2.0**127, 2.0**126, 2.0**64, 2.0**63, 1.0, 2.0**-126, 3.0])
def test_unscaling_is_exact_to_the_ends_of_float32(scale: float) -> None:
    """The inverse of 2**127 is subnormal, for which XLA takes 0."""
    scaler = GradScaler.create(init_scale=scale, min_scale=2.0**-126)
    grads = np.float32([1.0, 2.0**-10, 3.0, 2.0**120, 2.0**-70, 2.0**-100])
    with np.errstate(over="ignore"):
        expected = grads / np.float32(scale)
    expected[np.abs(expected) < 2.0**-126] = 0.0
    found = np.asarray(jax.jit(lambda scaler, grads: scaler.unscale(grads))(scaler, grads))
    # The inverse of a scale that is no power of two is rounded, and the product again: at most 2**-23 together.
    np.testing.assert_allclose(found, expected, rtol=0.0 if scale != 3.0 else 2.0**-23)


def test_a_complex_infinity_stays_one() -> None:
    found = LARGE.unscale(jnp.complex64([complex(jnp.inf, 1.0)]))
    assert found.real[0] == jnp.inf
    assert found.imag[0] == 2.0**-20


def quadratic(weights: dict[str, Any], x: Any, *, factor: Any = 1.0) -> Any:
    return ((x @ weights["w"] + weights["b"]) ** 2).mean() * factor


WEIGHTS = {"w": jnp.array([0.5, -1.0]), "b": jnp.array(0.25)}
X = jnp.array([[1.0, 2.0], [3.0, -1.0]])


def test_value_and_gradients_are_those_of_jax() -> None:
    """Equal to the bit: a power of two changes exponents only."""
    for argnums in (0, 1, (0, 1)):
        value, grads, check = LARGE.value_and_grad(quadratic, argnums)(WEIGHTS, X, factor=2.0)
        expected, exact = jax.value_and_grad(quadratic, argnums)(WEIGHTS, X, factor=2.0)
        assert value == expected
        jax.tree.map(np.testing.assert_array_equal, grads, exact)
        assert bool(check.finite)


def test_aux_goes_through_and_is_not_looked_at() -> None:
    def with_aux(weights: dict[str, Any], x: Any) -> Any:
        return quadratic(weights, x), {"log": jnp.log(-jnp.ones(())), "text": "words"}

    (value, aux), grads, check = LARGE.value_and_grad(with_aux, has_aux=True)(WEIGHTS, X)
    assert value == quadratic(WEIGHTS, X)
    assert (bool(jnp.isnan(aux["log"])), aux["text"], bool(check.finite)) == (True, "words", True)
    assert set(grads) == {"w", "b"}


def test_a_float16_loss_keeps_its_dtype_and_gets_gradients_in_float32() -> None:
    def loss(weight: Any) -> Any:
        return (weight * weight).sum()

    scaler = GradScaler.create(init_scale=2.0**10)
    value, grads, _ = scaler.value_and_grad(loss)(jnp.float16([2.0**-12, 1.0]))
    assert (value.dtype, grads.dtype) == (jnp.float16, jnp.float32)
    np.testing.assert_array_equal(np.asarray(grads), [2.0**-11, 2.0])


def test_gradients_that_float16_loses_are_kept() -> None:
    def loss(weight: Any) -> Any:
        return (weight.astype(jnp.float16) * jnp.float16(2.0**-20)).astype(jnp.float32).mean() * 2.0**-10

    weight = jnp.ones(4)
    assert not jax.grad(loss)(weight).any()
    _, grads, _ = LARGE.value_and_grad(loss)(weight)
    np.testing.assert_array_equal(np.asarray(grads), np.full(4, 2.0**-32))


def test_integer_arguments_get_float0_if_they_are_allowed() -> None:
    def loss(tree: Any) -> Any:
        return tree["w"].sum()

    tree = {"w": jnp.ones(2), "steps": jnp.array(3)}
    _, grads, check = LARGE.value_and_grad(loss, allow_int=True)(tree)
    assert grads["steps"].dtype == jax.dtypes.float0
    assert bool(check.finite)


def test_the_scale_of_the_iteration_is_the_one_that_is_divided_by() -> None:
    """Also in the iteration in which the scale grows."""
    scaler = GradScaler.create(init_scale=4.0, growth_interval=1)
    for _ in range(3):
        _, grads, check = scaler.value_and_grad(quadratic)(WEIGHTS, X)
        np.testing.assert_array_equal(grads["b"], jax.grad(quadratic)(WEIGHTS, X)["b"])
        scaler = scaler.update(check)
    assert float(scaler.scale) == 32.0


def test_a_disabled_scaler_adds_no_equation() -> None:
    off = GradScaler.create(enabled=False)

    def with_scaler(weights: dict[str, Any], x: Any) -> Any:
        value, grads, check = off.value_and_grad(quadratic)(weights, x)
        loss = off.scale_loss(value)
        assert off.update(check) is off
        return loss, off.unscale(grads)

    plain = jax.make_jaxpr(jax.value_and_grad(quadratic))(WEIGHTS, X)
    assert str(jax.make_jaxpr(with_scaler)(WEIGHTS, X)) == str(plain)


def test_the_function_keeps_its_name_and_signature() -> None:
    def loss(weights: Any, x: Any = X) -> Any:
        """Words."""
        return quadratic(weights, x)

    found = LARGE.value_and_grad(loss)
    assert (found.__name__, found.__doc__) == ("loss", "Words.")
    assert found(WEIGHTS)[0] == loss(WEIGHTS)


# What is refused


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda w: w * w, r"must be a scalar, not an array of shape \(2,\); return its mean or its sum"),
        (lambda w: jnp.int32(w.sum()), "must be a real array of a float dtype to be scaled, not one of dtype int32"),
        (lambda w: w.sum() * 1j, "not one of dtype complex64; return it as float32"),
        (lambda w: w.sum() > 0, "not one of dtype bool"),
        (lambda w: (w.sum(), w), "must be a scalar, not a tuple; to return more than the loss pass has_aux=True"),
        (lambda w: None, "not an object of type NoneType"),
    ],
    ids=["vector", "integer", "complex", "bool", "tuple", "None"],
)
def test_what_is_no_loss_is_refused_in_words(loss: Any, words: str) -> None:
    with pytest.raises(ScalingError, match=words):
        LARGE.value_and_grad(loss)(jnp.ones(2))


def test_has_aux_needs_a_pair() -> None:
    with pytest.raises(ScalingError, match=r"has_aux=True the function must return a pair \(loss, aux\), not"):
        LARGE.value_and_grad(lambda w: w.sum(), has_aux=True)(jnp.ones(2))


@pytest.mark.parametrize("loss", [jnp.int32(3), 1j, "text"])
def test_scale_loss_takes_real_floats_only(loss: Any) -> None:
    with pytest.raises(ScalingError, match="must be a real array of a float dtype"):
        LARGE.scale_loss(loss)
