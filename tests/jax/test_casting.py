"""The plan for an equation is the core's rule, but for literals, broadcast storage and products left alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from mezzo import CastPolicy, builtin_policy, input_dtypes
from mezzo.jax.casting import Plan, plan_equation
from mezzo.jax.settings import Settings
from mezzo.jax.values import Storage, Value, dtype_name

DEFAULT = builtin_policy("default", framework="jax")
FLOATS = ("float32", "bfloat16", "float16")
OPS: dict[str, Any] = {
    "dot_general": lambda x, y: x @ y,
    "exp": jnp.exp,
    "tanh": lax.tanh,
    "add": lax.add,
    "concatenate": lambda x, y: lax.concatenate([x, y], 0),
}
ARGUMENTS = {"dot_general": 2, "exp": 1, "tanh": 1, "add": 2, "concatenate": 2}


def equation_of(function: Any, *shapes: tuple[int, ...], dtype: str = "float32") -> Any:
    (equation,) = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).eqns
    return equation


def plan(equation: Any, *values: Value, dtype: str = "bfloat16", **settings: Any) -> Plan:
    chosen = settings.pop("policy", DEFAULT)
    return plan_equation(equation, equation.primitive.name, values, Settings(chosen, dtype, **settings))


def array(dtype: str, shape: tuple[int, ...] = (2, 2), **marks: Any) -> Value:
    return Value(jnp.zeros(shape, dtype), **marks)


def reached(found: Plan, *values: Value) -> list[str]:
    pairs = zip(found.targets, values, strict=True)
    return [dtype_name(value.array.dtype if target is None else target) for target, value in pairs]


@given(
    op=st.sampled_from(sorted(OPS)),
    rule=st.sampled_from(["lower_precision_fp", "fp32", "promote"]),
    low=st.sampled_from(["bfloat16", "float16"]),
    data=st.data(),
)
def test_computed_operands_get_the_dtypes_that_the_core_says(op: str, rule: str, low: str, data: st.DataObject) -> None:
    dtypes = [data.draw(st.sampled_from(FLOATS)) for _ in range(ARGUMENTS[op])]
    equation = equation_of(OPS[op], *[(2, 2)] * ARGUMENTS[op])
    values = [array(dtype) for dtype in dtypes]
    found = plan(equation, *values, dtype=low, policy=DEFAULT.override({op: rule}))
    assert found.rule == rule
    assert found.reason == ""
    assert reached(found, *values) == list(input_dtypes(CastPolicy(rule), dtypes, low))


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", sorted(OPS))
def test_opaque_brings_back_the_traced_dtypes(op: str, low: str) -> None:
    equation = equation_of(OPS[op], *[(2, 2)] * ARGUMENTS[op])
    values = [array(low)] * ARGUMENTS[op]
    found = plan(equation, *values, dtype=low, policy=DEFAULT.override({op: "opaque"}))
    assert reached(found, *values) == ["float32"] * len(values)


def test_fallthrough_leaves_an_operand_as_it_came() -> None:
    value = array("bfloat16")
    assert plan(equation_of(OPS["tanh"], (2, 2)), value).targets == [None]


def test_operands_that_must_agree_and_came_apart_are_promoted_under_fallthrough() -> None:
    low, wide = array("bfloat16"), array("float32")
    found = plan(equation_of(OPS["add"], (2, 2), (2, 2)), low, wide, policy=DEFAULT.override({"add": "fallthrough"}))
    assert reached(found, low, wide) == ["float32", "float32"]


def test_a_slice_that_is_written_takes_the_dtype_of_its_buffer() -> None:
    equation = jax.make_jaxpr(lambda x, y: lax.dynamic_update_slice(x, y, (0, 0)))(
        jnp.ones((4, 4)), jnp.ones((2, 2))
    ).eqns[-1]
    index = Value(np.int32(0))
    low, wide = array("bfloat16", (4, 4)), array("float32")
    assert reached(plan(equation, low, wide, index, index), low, wide, index, index)[:2] == ["bfloat16"] * 2
    zeros = array("float32", (4, 4), constants=frozenset({0.0}))
    assert reached(plan(equation, zeros, low, index, index), zeros, low, index, index)[:2] == ["float32"] * 2


# Literals


@pytest.mark.parametrize(
    ("number", "low", "expected"),
    [
        (2.0, "float16", "float16"),
        (0.0, "float16", "float16"),
        (float("-inf"), "float16", "float16"),
        (float("nan"), "float16", "float16"),
        (65504.0, "float16", "float16"),
        (65536.0, "float16", "float32"),
        (-1e9, "float16", "float32"),
        (1e-8, "float16", "float32"),
        (-1e9, "bfloat16", "bfloat16"),
        (1e-8, "bfloat16", "bfloat16"),
        (float(np.finfo(np.float32).min), "bfloat16", "float32"),
        (1e-39, "bfloat16", "float32"),
    ],
)
def test_a_literal_adapts_if_the_lower_precision_holds_it(number: float, low: str, expected: str) -> None:
    x, literal = array(low), Value(np.float32(number), frozenset({number}))
    found = plan(equation_of(OPS["add"], (2, 2), (2, 2)), x, literal, dtype=low)
    assert reached(found, x, literal) == [expected, expected]


def test_one_number_that_does_not_fit_is_enough() -> None:
    x, mask = array("float16"), array("float32", constants=frozenset({0.0, -1e9}))
    assert reached(plan(equation_of(OPS["add"], (2, 2), (2, 2)), x, mask, dtype="float16"), x, mask) == ["float32"] * 2


def test_an_equation_of_literals_alone_stays_as_traced() -> None:
    ones = array("float32", constants=frozenset({1.0}))
    found = plan(equation_of(OPS["add"], (2, 2), (2, 2)), ones, ones)
    assert (found.rule, found.reason) == ("opaque", "literals only")
    assert reached(found, ones, ones) == ["float32", "float32"]


def test_a_product_of_literals_is_a_product() -> None:
    ones = array("float32", constants=frozenset({1.0}))
    assert reached(plan(equation_of(OPS["dot_general"], (2, 2), (2, 2)), ones, ones), ones, ones) == ["bfloat16"] * 2


# Storage


ADD_BIAS = equation_of(lambda x, b: x + b, (4, 2), (1, 2))


@pytest.mark.parametrize(
    ("bias", "storage", "shape", "expected"),
    [
        ("adapt", Storage.SAME, (1, 2), "bfloat16"),
        ("adapt", Storage.REPEATED, (4, 2), "bfloat16"),
        ("adapt", Storage.NO, (1, 2), "float32"),
        ("adapt", Storage.SAME, (4, 2), "float32"),
        ("adapt", Storage.SAME, (), "float32"),
        ("promote", Storage.SAME, (1, 2), "float32"),
        ("promote", Storage.REPEATED, (4, 2), "float32"),
    ],
)
def test_a_stored_operand_adapts_if_it_is_broadcast(bias: Any, storage: Storage, shape: Any, expected: str) -> None:
    x, other = array("bfloat16", (4, 2)), array("float32", shape, storage=storage)
    assert reached(plan(ADD_BIAS, x, other, bias=bias), x, other) == [expected, expected]


def test_two_stored_operands_stay_float32() -> None:
    x, bias = array("float32", (4, 2), storage=Storage.SAME), array("float32", (1, 2), storage=Storage.SAME)
    assert reached(plan(ADD_BIAS, x, bias), x, bias) == ["float32", "float32"]


# Products


@pytest.mark.parametrize(
    ("precision", "reason"),
    [
        (lax.Precision.HIGHEST, "precision=HIGHEST"),
        ((lax.Precision.HIGH, lax.Precision.DEFAULT), "precision=HIGH"),
        (lax.DotAlgorithmPreset.F32_F32_F32, "precision=F32_F32_F32"),
        (lax.Precision.DEFAULT, ""),
        (None, ""),
    ],
)
def test_a_product_that_asks_for_a_precision_is_left_alone(precision: Any, reason: str) -> None:
    equation = equation_of(lambda x, y: lax.dot(x, y, precision=precision), (2, 2), (2, 2))
    values = array("float32"), array("float32")
    found = plan(equation, *values)
    assert found.reason == reason
    assert reached(found, *values) == ["float32" if reason else "bfloat16"] * 2


def test_a_product_of_operands_that_are_low_already_is_left_alone() -> None:
    equation = equation_of(
        lambda x, y: lax.dot(x, y, preferred_element_type="float32"), (2, 2), (2, 2), dtype="float16"
    )
    found = plan(equation, array("float16"), array("float16"))
    assert (found.reason, found.parameters) == ("already low", {})


@pytest.mark.parametrize("rule", ["lower_precision_fp", "fp32", "promote", "fallthrough"])
def test_the_result_dtype_of_a_product_is_that_of_its_operands(rule: str) -> None:
    equation = equation_of(OPS["dot_general"], (2, 2), (2, 2))
    values = array("bfloat16"), array("bfloat16")
    found = plan(equation, *values, policy=DEFAULT.override({"dot_general": rule}))
    assert [found.parameters["preferred_element_type"]] * 2 == [jnp.dtype(name) for name in reached(found, *values)]


def test_a_square_is_float32() -> None:
    equation = equation_of(lambda x: x * x, (2, 2))
    found = plan(equation, array("bfloat16"), array("bfloat16"))
    assert (found.rule, found.reason) == ("fp32", "x * x, which is a square")


@pytest.mark.parametrize(
    ("dtype", "reason"), [("complex64", "complex operand"), ("float8_e4m3fn", "float8_e4m3fn operand")]
)
def test_other_dtypes_are_left_alone(dtype: str, reason: str) -> None:
    equation = equation_of(lax.mul, (2, 2), (2, 2), dtype=dtype)
    found = plan(equation, array(dtype), array(dtype))
    assert (found.rule, found.reason, list(found.targets)) == ("opaque", reason, [None, None])


def test_an_equation_without_floats_is_bound_as_it_is() -> None:
    equation = equation_of(lax.add, (2, 2), (2, 2), dtype="int32")
    assert plan(equation, array("int32"), array("int32")).rule == "no floats"
