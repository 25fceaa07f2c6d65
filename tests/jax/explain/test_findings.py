"""Warnings: products that stay in float32 and why, and what was not looked into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax import Array, lax
from jax import numpy as jnp
from jax.extend.core import Primitive

from mezzo.builtin import builtin_policy
from mezzo.jax import UnknownPrimitiveWarning, autocast, disabled
from mezzo.jax.explain import explain

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))


@jax.custom_vjp
def attention(q: Array, k: Array) -> Array:
    return jnp.tanh(q @ k) @ k


attention.defvjp(lambda q, k: (attention(q, k), (q, k)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@jax.custom_vjp
def identity(x: Array) -> Array:
    return x * 1.0


identity.defvjp(lambda x: (identity(x), None), lambda _, g: (g,))


def off(w: Array, x: Array) -> Array:
    with disabled():
        return x @ w


def off_in_jit(w: Array, x: Array) -> Array:
    with disabled():
        return jax.jit(lambda x: x @ w @ w)(x)


def loop(w: Array, x: Array) -> Array:
    return lax.while_loop(lambda h: jnp.sum(h @ w) < 0, lambda h: h @ w @ w, x)


OUT = "leave precision= away if lower precision is good enough here"
WHILE = "if the loop does not stop at a tolerance: autocast(..., while_='body')"
ENTER = "if its rules are safe in lower precision: autocast(..., custom_vjp={'%s': 'enter'})"
FP32 = builtin_policy("default", framework="jax").override({"dot_general": "fp32"})
POLICY = "the policy has it so; another: Policy.override({'dot_general': 'lower_precision_fp'})"

CASES: dict[str, tuple[Callable[[Array, Array], Array], dict[str, Any], str, str, str]] = {
    "precision": (
        lambda w, x: jnp.matmul(x, w, precision="highest"), {},
        "float32 dot", "dot_general stays in float32: precision=HIGHEST", OUT,
    ),
    "disabled": (off, {}, "float32 dot", "dot_general stays in float32: disabled()", ""),
    "disabled in jit": (
        off_in_jit, {}, "float32 dot",
        "jit keeps its dtypes (disabled()), with 2 matrix products in float32 inside", "",
    ),
    "policy": (lambda w, x: x @ w, {"policy": FP32}, "float32 dot", "dot_general stays in float32: rule fp32", POLICY),
    "custom_vjp with products": (
        lambda w, x: attention(x, w), {}, "opaque custom_vjp",
        "opaque custom_vjp attention: it keeps its dtypes, with 2 matrix products in float32 inside", ENTER % "attention",
    ),
    "custom_vjp without": (
        lambda w, x: identity(x @ w), {}, "opaque custom_vjp",
        "opaque custom_vjp identity: it keeps its dtypes", ENTER % "identity",
    ),
    "while": (
        loop, {}, "float32 dot", "while keeps its dtypes, with 3 matrix products in float32 inside", WHILE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_stays_in_float32_is_told_with_its_reason_line_and_cure(case: str) -> None:
    fn, options, kind, message, advice = CASES[case]
    (finding,) = explain(fn, **options)(W, X).warnings
    assert (finding.kind, finding.message, finding.advice) == (kind, message, advice)
    assert finding.source is not None
    assert finding.source.file == __file__


CURED: dict[str, tuple[Callable[[Array, Array], Array], dict[str, Any]]] = {
    "custom_vjp": (lambda w, x: attention(x, w), {"custom_vjp": {"attention": "enter"}}),
    "policy": (lambda w, x: x @ w, {"policy": FP32.override({"dot_general": "lower_precision_fp"})}),
    "precision": (lambda w, x: jnp.matmul(x, w), {}),
}


@pytest.mark.parametrize("case", CURED)
def test_the_cure_ends_the_warning(case: str) -> None:
    fn, options = CURED[case]
    report = explain(fn, **options)(W, X)
    assert report.warnings == ()
    assert {dot.used for dot in report.dots} == {("bfloat16", "bfloat16")}


def test_a_loop_that_is_entered_is_told_of_for_its_condition_at_most() -> None:
    def no_dot_in_the_condition(w: Array, x: Array) -> Array:
        return lax.while_loop(lambda h: jnp.sum(h) < 0, lambda h: h @ w, x)

    report = explain(no_dot_in_the_condition, while_="body")(W, X)
    assert report.warnings == ()
    assert [(record.used, record.times) for record in report.where(dot=True).records] == [(("bfloat16",) * 2, None)]


def test_dots_that_were_not_entered_count_too() -> None:
    report = explain(lambda w, x: attention(x @ w, w))(W, X)
    assert {(dot.used[0], dot.count) for dot in report.dots} == {("bfloat16", 1), ("float32", 2)}
    inside = report.where(reason="inside opaque custom_vjp attention", dot=True).records
    assert len(inside) == 2
    assert all(record.source and record.source.function == "attention" for record in inside)


def test_dots_of_float64_are_told_of() -> None:
    with jax.enable_x64(True):
        w = jnp.ones((4, 4), jnp.float64)
        (finding,) = explain(lambda w, x: x.astype(jnp.float64) @ w)(w, X).warnings
    assert finding.message.startswith("dot_general stays in float64: float64")
    assert finding.advice == "cast the float64 operand to float32 first"


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32])
def test_dots_without_floats_are_not(dtype: Any) -> None:
    assert explain(lambda w, x: x.astype(dtype) @ w)(W.astype(dtype), X).warnings == ()


def test_an_unknown_primitive_is_told_of() -> None:
    primitive = Primitive("spam_of_explain")
    primitive.def_abstract_eval(lambda aval: aval)
    with pytest.warns(UnknownPrimitiveWarning, match="spam_of_explain"):
        (finding,) = explain(lambda w, x: primitive.bind(x @ w))(W, X).warnings
    assert finding.kind == "unknown primitive"
    assert finding.message == "the primitive spam_of_explain is in no table: it keeps the dtypes that were traced"
    assert "register_primitive" in finding.advice


def test_the_same_at_the_same_line_is_told_once_with_its_number() -> None:
    def thrice(w: Array, x: Array) -> Array:
        for _ in range(3):
            x = jnp.matmul(x, w, precision="highest")
        return x

    (finding,) = explain(thrice)(W, X).warnings
    assert finding.count == 3
    assert "(3 times)" in str(finding)


def test_a_program_that_is_as_it_should_be_has_no_warnings() -> None:
    def fine(w: Array, x: Array) -> Array:
        h = jax.nn.gelu(x @ w)
        return jnp.mean(jax.nn.log_softmax(h @ w + 1.0))

    assert explain(jax.value_and_grad(autocast(fine)))(W, X).warnings == ()
