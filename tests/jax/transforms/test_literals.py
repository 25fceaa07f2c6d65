"""Numbers in the code adapt to the activation they meet, unless its dtype cannot hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mezzo.jax import autocast

from .seen import arrays, distance, dots

Fn = Callable[..., Any]

HALF, BRAIN, WIDE = "float16", "bfloat16", "float32"


def flows(fn: Fn, low: str) -> str:
    """Give the dtype in which ``fn(x @ x)`` comes out; of its first result, if there are several."""
    (x,) = arrays((3, 3))
    made = autocast(lambda x: fn(x @ x), dtype=low, outputs="flow")
    assert dots(made, x) == {(low,) * 3: 1}
    return str(jax.tree.leaves(jax.eval_shape(made, x))[0].dtype)


# number: (in bfloat16, in float16)
NUMBERS: dict[str, tuple[float, str, str]] = {
    "2": (2.0, BRAIN, HALF),
    "0": (0.0, BRAIN, HALF),
    "a third": (1 / 3, BRAIN, HALF),
    "1e-8": (1e-8, BRAIN, WIDE),
    "1e-5": (1e-5, BRAIN, WIDE),
    "1e-4": (1e-4, BRAIN, HALF),
    "1e-40": (1e-40, WIDE, WIDE),
    "65504": (65504.0, BRAIN, HALF),
    "1e5": (1e5, BRAIN, WIDE),
    "-1e9": (-1e9, BRAIN, WIDE),
    "the least float32": (float(jnp.finfo(jnp.float32).min), WIDE, WIDE),
    "the least bfloat16": (float(jnp.finfo(jnp.bfloat16).min), BRAIN, WIDE),
    "inf": (float("inf"), BRAIN, HALF),
    "-inf": (float("-inf"), BRAIN, HALF),
    "nan": (float("nan"), BRAIN, HALF),
}

MEETINGS: dict[str, Fn] = {
    "add": lambda y, number: y + number,
    "mul": lambda y, number: number * y,
    "max": jnp.maximum,
    "where": lambda y, number: jnp.where(y > 0, y, number),
    "full": lambda y, number: jnp.where(y > 0, jnp.full((3, 3), number), y),
    "numpy": lambda y, number: y + np.float32(number),
    "pad": lambda y, number: lax.pad(y, jnp.float32(number), [(1, 1, 0), (0, 0, 0)]),
}


@pytest.mark.parametrize("low", [BRAIN, HALF])
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("how", MEETINGS)
def test_a_number_adapts_if_the_low_dtype_can_hold_it(how: str, name: str, low: str) -> None:
    number, in_brain, in_half = NUMBERS[name]
    assert flows(lambda y: MEETINGS[how](y, number), low) == (in_brain if low == BRAIN else in_half)


COMPUTED: dict[str, tuple[Fn, str, str]] = {
    "a scale of attention": (lambda y: y / jnp.sqrt(64.0), BRAIN, HALF),
    "by rsqrt": (lambda y: y * lax.rsqrt(jnp.float32(64.0)), BRAIN, HALF),
    "a product of numbers": (lambda y: y * (jnp.float32(1e3) * jnp.float32(1e3)), BRAIN, WIDE),
    "a mask of booleans": (lambda y: y * (y > 0), BRAIN, HALF),
    "a mask as floats": (lambda y: y * (y > 0).astype(jnp.float32), BRAIN, HALF),
    "ones": (lambda y: y + jnp.ones((3, 1)), BRAIN, HALF),
    "zeros": (lambda y: jnp.concatenate([y, jnp.zeros((1, 3))]), BRAIN, HALF),
    "zeros_like": (lambda y: jnp.zeros_like(y) + y, BRAIN, HALF),
    "where with an integer": (lambda y: jnp.where(y > 0, y, 0), BRAIN, HALF),
    "a padding": (lambda y: jnp.pad(y, 1), BRAIN, HALF),
    "clip": (lambda y: jnp.clip(y, -1.0, 1.0), BRAIN, HALF),
    "clip at much": (lambda y: jnp.clip(y, -1e6, 1e6), BRAIN, WIDE),
    "relu6": (jax.nn.relu6, BRAIN, HALF),
    "a mask of -1e9": (lambda y: y + (1.0 - jnp.tri(3)) * -1e9, BRAIN, WIDE),
    "a mask of -inf": (lambda y: jnp.where(jnp.tri(3) > 0, y, -jnp.inf), BRAIN, HALF),
    "integers": (lambda y: y * jnp.arange(3), WIDE, WIDE),
    "an integer number": (lambda y: y * 3, BRAIN, HALF),
    "a large integer number": (lambda y: y * 100_000, BRAIN, WIDE),
    "a size": (lambda y: y / y.shape[0], BRAIN, HALF),
}


@pytest.mark.parametrize("low", [BRAIN, HALF])
@pytest.mark.parametrize("how", COMPUTED)
def test_what_is_made_of_numbers_and_masks_adapts_too(how: str, low: str) -> None:
    fn, in_brain, in_half = COMPUTED[how]
    assert flows(fn, low) == (in_brain if low == BRAIN else in_half)


@pytest.mark.parametrize("around", ["jit", "scan", "cond", "remat"])
def test_a_number_that_is_handed_into_a_function_adapts_there(around: str) -> None:
    wrapped: dict[str, Fn] = {
        "jit": lambda y: jax.jit(lambda y, n: y * n + n)(y, 2.0),
        "scan": lambda y: lax.scan(lambda c, _: (c, y * 0.5 + 1.0), 0, None, 2)[1],
        "cond": lambda y: lax.cond(True, lambda y: y * 2.0, lambda y: y - 2.0, y),
        "remat": jax.checkpoint(lambda y: y * 2.0 + 1.0),
    }
    assert flows(wrapped[around], BRAIN) == BRAIN
    assert flows(wrapped[around], HALF) == HALF


MASKED: dict[str, Fn] = {
    "where": lambda scores, mask, number: jnp.where(mask, scores, number),
    "additive": lambda scores, mask, number: scores + jnp.where(mask, 0.0, number),
    "additive by product": lambda scores, mask, number: scores + (1.0 - mask.astype(jnp.float32)) * max(number, -1e30),
}


@pytest.mark.parametrize("low", [BRAIN, HALF])
def test_masked_softmax_is_right(low: str) -> None:
    numbers = (-1e9, float("-inf"), float(jnp.finfo(jnp.float32).min))
    mask = jnp.array([[True, True, False], [True, False, False], [False, True, True]])

    def attend(x: jax.Array, mask: jax.Array) -> dict[Any, jax.Array]:
        scores = x @ x.T
        return {
            (how, number): jax.nn.softmax(MASKED[how](scores, mask, number)) for how in MASKED for number in numbers
        }

    (x,) = arrays((3, 3))
    made = autocast(attend, dtype=low)
    assert dots(made, x, mask) == {(low,) * 3: 1}
    got, want = jax.jit(made)(x, mask), jax.jit(attend)(x, mask)
    for case, weights in got.items():
        assert bool(jnp.all(weights[~mask] == 0.0)), case
        assert distance(weights, want[case]) < (2e-2 if low == BRAIN else 5e-3), case


def test_a_tiny_eps_in_float16_keeps_a_division_finite() -> None:
    def unit(x: jax.Array) -> jax.Array:
        y = x @ x
        return y / (jnp.abs(y) + 1e-8)

    made = autocast(unit, dtype="float16")
    assert dots(made, jnp.zeros((2, 2))) == {(HALF,) * 3: 1}
    assert bool(jnp.all(jax.jit(made)(jnp.zeros((2, 2))) == 0.0))


def test_results_of_numbers_alone_have_the_traced_dtype_and_value() -> None:
    def numbers(x: jax.Array) -> Any:
        return jnp.sqrt(2.0), jnp.ones(3) / 3.0, x @ x, jnp.exp(jnp.float32(1.0)), (jnp.tri(2) * -1e9)

    (x,) = arrays((2, 2))
    got, want = jax.jit(autocast(numbers, dtype="float16"))(x), jax.jit(numbers)(x)
    for place in (0, 1, 3, 4):
        assert got[place].dtype == want[place].dtype == jnp.float32
        assert distance(got[place], want[place]) < 1e-6  # float32's own rounding
    assert 1e-6 < distance(got[2], want[2]) < 5e-3
