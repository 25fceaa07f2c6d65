"""Random programs: under autocast they have the same types, low products, and nearly the same numbers and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from jax._src.core import check_jaxpr  # public since JAX 0.10

from mezzo.jax import autocast

from .programs import SIZE, Inputs, programs, run
from .seen import BF16, F16, arrays, dots, signature

FIXED = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


def inputs() -> tuple[jax.Array, Inputs]:
    h, x, w, b = arrays((SIZE, SIZE), (SIZE, SIZE), (SIZE, SIZE), (SIZE,), seed=3)
    mask = jnp.array([[True, False, True], [True, True, False], [False, True, True]])
    return h, {"x": x, "w": w / np.sqrt(SIZE), "b": b, "mask": mask, "ids": jnp.array([2, 1, 1])}


def net(program: Any) -> Any:
    # A product first, so that there is a low activation to begin with, and one last.
    return lambda h, given: jnp.tanh(run((("dot",), *program), h, given)) @ given["w"]


def loss(program: Any) -> Any:
    return lambda floats, given: jnp.mean(jnp.square(net(program)(floats["h"], given | floats)))


def floats_of(h: jax.Array, given: Inputs) -> dict[str, jax.Array]:
    return {"h": h, **{name: given[name] for name in ("x", "w", "b")}}


@pytest.mark.parametrize("low", [BF16, F16], ids=["bfloat16", "float16"])
@settings(max_examples=12, **FIXED)  # type: ignore[arg-type]
@given(programs(kinked=True))
def test_types_and_products(low: tuple[str, ...], program: Any) -> None:
    note(str(program))
    h, given = inputs()
    plain, made = net(program), autocast(net(program), dtype=low[0])
    found = dots(made, h, given)
    assert set(found) == {low}
    assert found.total() == dots(plain, h, given).total()
    assert signature(made, h, given) == signature(plain, h, given)
    gradient = jax.make_jaxpr(jax.grad(autocast(loss(program), dtype=low[0])))(floats_of(h, given), given)
    check_jaxpr(gradient.jaxpr)
    assert {aval.dtype.name for aval in gradient.out_avals} == {"float32"}


@settings(max_examples=4, **FIXED)  # type: ignore[arg-type]
@given(programs(kinked=False), st.sampled_from([("bfloat16", 8), ("float16", 11)]))
def test_numbers_and_gradients(program: Any, low: tuple[str, int]) -> None:
    note(str(program))
    name, bits = low
    h, given = inputs()
    floats = floats_of(h, given)
    want, slopes = jax.jit(jax.value_and_grad(loss(program)))(floats, given)
    got, found = jax.jit(jax.value_and_grad(autocast(loss(program), dtype=name)))(floats, given)
    # Up to fifteen steps, each of which rounds once or twice and may double an error from before.
    tolerance = 2.0**-bits * 30
    assert abs(float(got) - float(want)) <= tolerance * max(1.0, abs(float(want)))
    for argument, slope in slopes.items():
        norm = float(jnp.linalg.norm(slope))
        assert float(jnp.linalg.norm(found[argument] - slope)) <= 2 * tolerance * max(norm, 0.1), argument


@settings(max_examples=12, **FIXED)  # type: ignore[arg-type]
@given(programs(kinked=True))
def test_the_program_is_the_same_at_every_trace(program: Any) -> None:
    note(str(program))
    h, given = inputs()
    first, second = (str(jax.make_jaxpr(autocast(net(program)))(h, given)) for _ in range(2))
    assert "bf16" in first
    assert first == second


@settings(max_examples=12, **FIXED)  # type: ignore[arg-type]
@given(programs(kinked=True))
def test_autocast_of_a_gradient_has_low_products_too(program: Any) -> None:
    note(str(program))
    h, given = inputs()
    plain = jax.grad(loss(program))
    made = autocast(plain)
    args = (floats_of(h, given), given)
    found = dots(made, *args)
    assert set(found) == {BF16}
    assert found.total() == dots(plain, *args).total()
    assert signature(made, *args) == signature(plain, *args)
