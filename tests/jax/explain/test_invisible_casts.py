"""Casts to float32 that leave no equation: found, followed, and told of where they matter."""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import numpy as np
import pytest
from jax import Array, lax
from jax import numpy as jnp

from mezzo.jax import autocast, disabled, upcast
from mezzo.jax.explain import explain
from mezzo.jax.invisible_casts import CastWatch
from mezzo.report import Finding

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))
F32 = jnp.float32


def lost(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Finding]:
    return [one for one in explain(fn, **options)(*(args or (W, X))).warnings if one.kind == "invisible cast"]


SPELLINGS: dict[str, Callable[[Array], Array]] = {
    "x.astype(float32)": lambda h: h.astype(F32),
    "x.astype(float32) by name": lambda h: h.astype("float32"),
    "x.astype(float32) of NumPy": lambda h: h.astype(np.float32),
    "x.astype(float32) of Python": lambda h: h.astype(float),
    "x.astype(float32) by keyword": lambda h: h.astype(dtype=F32),
    "x.astype(float32) of jnp": lambda h: jnp.astype(h, F32),
    "jnp.asarray(x, float32)": lambda h: jnp.asarray(h, F32),
    "jnp.asarray(x, float32) by keyword": lambda h: jnp.asarray(h, dtype=np.dtype("float32")),
    "jnp.array(x, float32)": lambda h: jnp.array(h, dtype=F32),
    "jnp.asarray(x, float32) as a call": jnp.float32,
    "lax.convert_element_type(x, float32)": lambda h: lax.convert_element_type(h, F32),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_way_to_write_the_cast_is_found(spelling: str) -> None:
    cast = SPELLINGS[spelling]
    (finding,) = lost(lambda w, x: jnp.sum(cast(x @ w) - 1.0))
    assert finding.message.startswith(f"{spelling.split(') ')[0].removesuffix(')')}) was lost: the value is bfloat16")
    assert finding.source is not None
    assert finding.source.file == __file__
    assert "mezzo.jax.upcast(x)" in finding.advice


def test_it_says_what_computes_in_lower_precision_and_where() -> None:
    def variance(w: Array, x: Array) -> Array:
        h = (x @ w).astype(F32)
        d = h - 1.0
        return jnp.sum(h + d)

    first = variance.__code__.co_firstlineno
    (finding,) = lost(variance, dtype="float16")
    place = "explain/test_invisible_casts.py"
    assert finding.message == (
        "x.astype(float32) was lost: the value is float16 under autocast, and so it goes into "
        f"sub at {place}:{first + 2}, add at {place}:{first + 3}"
    )
    assert finding.source is not None
    assert finding.source.line == first + 1


def inside_scan(w: Array, x: Array) -> Array:
    return jnp.sum(lax.scan(lambda c, row: (c, (row @ w).astype(F32) - 1.0), 0.0, x)[1])


def in_a_carry(w: Array, x: Array) -> Array:
    def body(h: Array, _: None) -> tuple[Array, None]:
        low = (h @ w).astype(F32)
        return low - 1.0, None

    return jnp.sum(lax.scan(body, x, None, length=2)[0])


def in_a_branch(w: Array, x: Array) -> Array:
    return jnp.sum(lax.cond(x[0, 0] > 0, lambda h: h.astype(F32) - 1.0, lambda h: h, x @ w))


def in_remat(w: Array, x: Array) -> Array:
    return jnp.sum(jax.checkpoint(lambda x: (x @ w).astype(F32) - 1.0)(x))


@jax.jit
def jitted(h: Array) -> Array:
    return h.astype(F32)


def returned_by_jit(w: Array, x: Array) -> Array:
    return jnp.sum(jitted(x @ w) - 1.0)


def through_reshapes(w: Array, x: Array) -> Array:
    return jnp.sum((x @ w).astype(F32).reshape(-1)[None].T - 1.0)


def into_jit(w: Array, x: Array) -> Array:
    return jnp.sum(jax.jit(lambda h: h - 1.0)((x @ w).astype(F32)))


EVERYWHERE = [inside_scan, in_a_carry, in_a_branch, in_remat, returned_by_jit, through_reshapes, into_jit]


@pytest.mark.parametrize("fn", EVERYWHERE, ids=lambda fn: fn.__name__)
def test_it_is_found_inside_of_anything(fn: Any) -> None:
    jitted(X)  # what is compiled already is looked at too
    (finding,) = lost(fn)
    assert "was lost: the value is bfloat16" in finding.message
    assert "sub at " in finding.message


@pytest.mark.parametrize("fn", [inside_scan, returned_by_jit], ids=lambda fn: fn.__name__)
def test_it_is_found_under_a_gradient(fn: Any) -> None:
    assert len(lost(jax.jit(jax.value_and_grad(autocast(fn))), W, X)) == 1


def test_in_the_gradient_of_plain_code_it_is_found() -> None:
    assert len(lost(autocast(jax.grad(lambda w, x: jnp.sum((x @ w).astype(F32) - 1.0))), W, X)) == 1


def test_where_jax_drops_the_marker_a_note_says_that_it_could_not_be_followed() -> None:
    report = explain(autocast(jax.grad(returned_by_jit)))(W, X)
    (note,) = report.notes
    assert note.startswith(
        "casts to float32 of values whose dtype under autocast could not be followed: x.astype(float32) at"
    )


FINE: dict[str, Callable[[Array, Array], Array]] = {
    "upcast": lambda w, x: jnp.sum(upcast(x @ w) - 1.0),
    "the value is float32": lambda w, x: jnp.sum(x.astype(F32) - 1.0),
    "only a product reads it": lambda w, x: jnp.sum((x @ w).astype(F32) @ w),
    "what reads it casts by itself": lambda w, x: jnp.sum(jnp.exp((x @ w).astype(F32))),
    "the table saves it": lambda w, x: (lambda h: jnp.mean(h * h) - jnp.mean(h) ** 2)((x @ w).astype(F32)),
    "nothing reads it": lambda w, x: (lambda h: jnp.sum(x))((x @ w).astype(F32)),
    "what computes comes before it": lambda w, x: (lambda h: (h - 1.0, h.astype(F32)))(x @ w),
    "it is returned": lambda w, x: (x @ w).astype(F32),
    "the other operand is float32": lambda w, x: jnp.sum((x @ w).astype(F32) * jnp.sum(x)),
    "a cast with an equation": lambda w, x: jnp.sum((x @ w).astype(jnp.bfloat16).astype(F32) - 1.0),
    "a cast to something else": lambda w, x: jnp.sum((x @ w).astype(jnp.float16) - 1),
    "no dtype": lambda w, x: jnp.sum(jnp.asarray(x @ w) - 1.0),
    "a library function of JAX": lambda w, x: jnp.sum(jnp.var(x @ w) + jax.nn.softmax(x @ w)),
}


@pytest.mark.parametrize("fn", FINE.values(), ids=FINE)
def test_a_cast_that_changes_nothing_is_not_warned_of(fn: Any) -> None:
    assert lost(fn) == []


def test_a_cast_inside_of_disabled_is_honoured() -> None:
    def safe(w: Array, x: Array) -> Array:
        h = x @ w
        with disabled():
            return jnp.sum(h.astype(F32) - 1.0)

    assert lost(safe) == []


def test_the_cast_that_is_warned_of_costs_digits_and_the_advice_brings_them_back() -> None:
    def spread(cast: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
        def fn(w: Array, x: Array) -> Array:
            h = cast(x @ w + 100.0)
            return jnp.sum(h + 0.25)

        return fn

    plain = spread(lambda h: h.astype(F32))
    assert len(lost(plain)) == 1
    assert lost(spread(upcast)) == []
    w = jnp.zeros((4, 4))
    # bfloat16 has 8 bits: near 100 its steps are 0.5, so 0.25 is lost to rounding.
    assert float(autocast(plain)(w, X)) == 800.0
    assert float(autocast(spread(upcast))(w, X)) == 802.0


def test_it_is_told_once_where_an_autocast_is_inside_of_another() -> None:
    inner = autocast(lambda w, x: jnp.sum((x @ w).astype(F32) - 1.0), "float16")
    (finding,) = lost(autocast(lambda w, x: inner(w, x) + jnp.sum(x @ w)), W, X)
    assert "float16" in finding.message


# The watch itself


def test_a_watch_can_be_entered_inside_of_itself() -> None:
    with CastWatch() as watch:
        with watch:
            pass
        jax.make_jaxpr(lambda x: x.astype(F32))(X)
    jax.make_jaxpr(lambda x: x.astype(F32) + 1)(X)
    assert len(watch.found) == 1
    assert sys.getprofile() is None


def test_only_regions_are_marked() -> None:
    seen: list[str] = []

    def step(w: Array, x: Array) -> Array:
        jaxpr = jax.make_jaxpr(lambda x: x.astype(F32) - 1.0)(x)
        seen.extend(equation.primitive.name for equation in jaxpr.eqns)
        return autocast(lambda w, x: x @ w)(w, x)

    explain(step)(W, X)
    assert seen == ["sub"]


def test_a_weak_value_leaves_an_equation_and_is_not_marked() -> None:
    with CastWatch() as watch:
        jaxpr = jax.make_jaxpr(lambda x: x.astype(F32))(1.0)
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["convert_element_type"]
    assert watch.found == []


def test_a_profile_function_rests_and_comes_back() -> None:
    calls: list[str] = []

    def mine(frame: FrameType, event: str, argument: object) -> None:
        calls.append(frame.f_code.co_name)

    sys.setprofile(mine)
    try:
        with pytest.raises(ZeroDivisionError):
            explain(autocast(lambda x: 1 // 0))(X)
        assert sys.getprofile() is mine
        assert len(lost(autocast(inside_scan), W, X)) == 1
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    assert "inside_scan" not in calls


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cProfile watches in another way since Python 3.12")
def test_under_a_profiler_in_c_a_note_says_what_is_not_looked_for() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        report = explain(autocast(inside_scan))(W, X)
    finally:
        profiler.disable()
    assert report.warnings == ()
    assert report.notes == ("casts that leave no equation were not looked for: a profiler is running in this thread",)
    assert report.dots[0].runs == 2
