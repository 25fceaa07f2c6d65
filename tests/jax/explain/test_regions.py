"""What `explain` says of each equation, and where in a program it finds autocast."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import Array, lax
from jax import numpy as jnp

from mezzo.builtin import builtin_policy
from mezzo.errors import DtypeError, OptionError
from mezzo.jax import autocast, disabled
from mezzo.jax.explain import explain
from mezzo.report import Report

W, X = jnp.ones((4, 3)), jnp.ones((2, 4))
LOW = ("bfloat16", "bfloat16")


def loss(w: Array, x: Array) -> Array:
    h = x @ w
    return jnp.mean(jnp.exp(h) + 1.0)


def ops(report: Report) -> list[str]:
    return [record.op for record in report.records]


def test_each_equation_has_its_rule_dtypes_and_line() -> None:
    report = explain(autocast(loss))(W, X)
    dot, exp, _add, total, _div = report.records
    first = loss.__code__.co_firstlineno
    assert ops(report) == ["dot_general", "exp", "add", "reduce_sum", "div"]
    assert (dot.rule, dot.reason, dot.dot) == ("lower_precision_fp", "", True)
    assert (dot.traced_in, dot.came, dot.used) == (("float32",) * 2, ("float32",) * 2, LOW)
    assert (dot.traced_out, dot.gave) == (("float32",), ("bfloat16",))
    assert (dot.shapes_in, dot.shapes_out) == (((2, 4), (4, 3)), ((2, 3),))
    assert (exp.rule, exp.came, exp.used, exp.gave) == ("fp32", ("bfloat16",), ("float32",), ("float32",))
    assert dot.source is not None
    assert (dot.source.file, dot.source.line, dot.source.function) == (__file__, first + 1, "loss")
    assert total.source is not None
    assert total.source.line == first + 2


def test_the_summary_counts_dots_and_casts_with_their_bytes() -> None:
    report = explain(autocast(loss))(W, X)
    assert [(dot.used, dot.gave, dot.count, dot.runs) for dot in report.dots] == [(LOW, ("bfloat16",), 1, 1)]
    totals = report.totals
    # Both operands of the dot go down (12 + 8 elements), and what exp gets goes up (6 elements).
    assert (totals.casts, totals.bytes_read, totals.bytes_written) == (3, 20 * 4 + 6 * 2, 20 * 2 + 6 * 4)


def test_literals_are_no_casts() -> None:
    report = explain(autocast(lambda w, x: (x @ w) * 2.0 + 1.0))(W, X)
    assert [record.casts for record in report.where(dot=False).records] == [(), ()]
    assert [record.gave for record in report.where(dot=False).records] == [("bfloat16",)] * 2


WRAPPED: dict[str, Any] = {
    "itself": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "jit of value_and_grad": lambda f: jax.jit(jax.value_and_grad(f)),
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "a scan over it": lambda f: lambda w, x: lax.scan(lambda c, row: (c + f(w, row[None]), None), 0.0, x)[0],
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_autocast_is_found_inside_of_what_is_around_it(wrap: Any) -> None:
    report = explain(wrap(autocast(loss, "float16")))(W, X[None] if wrap is WRAPPED["vmap"] else X)
    (region,) = report.regions
    assert region.name == "loss"
    assert dict(region.settings) == {"dtype": "float16", "policy": "default"}
    assert [(dot.used, dot.count) for dot in region.totals.dots] == [(("float16", "float16"), 1)]
    assert ops(report)[0] == "dot_general"


def test_a_function_without_autocast_is_explained_as_if_it_had_it() -> None:
    policy = builtin_policy("default", framework="jax").override({"exp": "fallthrough"})
    report = explain(loss, dtype="float16", policy=policy, carry="fixpoint")(W, X)
    assert dict(report.regions[0].settings) == {"dtype": "float16", "policy": policy.name, "carry": "fixpoint"}
    assert report.where(op="exp").records[0].used == ("float16",)
    assert report.dots[0].used == ("float16", "float16")


def test_a_train_step_is_explained_as_it_is() -> None:
    @jax.jit
    def step(w: Array, x: Array) -> tuple[Array, Array]:
        value, gradient = jax.value_and_grad(autocast(loss))(w, x)
        return w - 0.1 * gradient, value

    report = explain(step)(W, X)
    assert report.title == "step"
    assert [region.name for region in report.regions] == ["loss"]
    assert ops(report) == ["dot_general", "exp", "add", "reduce_sum", "div"]


def test_several_regions_are_told_apart_and_equal_ones_are_counted() -> None:
    def other(w: Array, x: Array) -> Array:
        return jnp.sum(x @ w)

    def both(w: Array, x: Array) -> Array:
        low = autocast(loss)
        return low(w, x) + autocast(other, "float16")(w, x) + low(w, x)

    report = explain(both)(W, X)
    assert [(region.name, region.settings["dtype"], region.count) for region in report.regions] == [
        ("loss", "bfloat16", 2),
        ("other", "float16", 1),
    ]
    assert "loss (2 times): bfloat16, policy default" in str(report)


def test_an_autocast_inside_of_another_is_a_region_of_its_own() -> None:
    inner = autocast(loss, "float16")
    report = explain(autocast(lambda w, x: inner(w, x) + jnp.sum(x @ w)))(W, X)
    dots = {region.name: [dot.used for dot in region.totals.dots] for region in report.regions}
    assert dots == {"loss": [("float16", "float16")], "<lambda>": [LOW]}


def test_what_is_inside_of_loops_and_calls_has_its_path_and_how_often_it_runs() -> None:
    @jax.jit
    def layer(h: Array) -> Array:
        return jnp.tanh(h @ jnp.eye(4))

    def deep(x: Array) -> Array:
        def twice(h: Array, _: None) -> tuple[Array, None]:
            return lax.scan(lambda h, _: (layer(h), None), h, None, length=2)[0], None

        return jnp.sum(lax.scan(twice, x, None, length=3)[0])

    report = explain(autocast(deep))(X)
    (dot,) = report.where(dot=True).records
    assert dot.path == ("scan", "scan", "jit layer")
    assert dot.times == 6
    assert str(report.dots[0]) == "bfloat16 x bfloat16 -> bfloat16: 1, run 6 times"


def test_branches_are_all_there() -> None:
    def choose(x: Array) -> Array:
        return lax.cond(x[0, 0] > 0, lambda x: x @ x.T, lambda x: jnp.exp(x @ x.T), x)

    report = explain(autocast(choose))(X)
    assert [record.path[-1] for record in report.where(dot=True).records] == ["cond branch 0", "cond branch 1"]


def test_named_scopes_are_part_of_the_path() -> None:
    def scoped(w: Array, x: Array) -> Array:
        with jax.named_scope("encoder"), disabled():
            return jax.jit(lambda x: x @ w)(x)

    assert all("encoder" in record.path for record in explain(autocast(scoped))(W, X).records)
    assert "mezzo" not in str(explain(autocast(scoped))(W, X).where(dot=True).table())


def test_rules_of_derivatives_are_marked_as_such() -> None:
    step = jax.grad(autocast(lambda w, x: jnp.sum(jax.nn.relu(x @ w))))
    phases = {record.phase for record in explain(step)(W, X).records}
    assert phases == {"forward", "derivative"}
    assert {record.phase for record in explain(step.__wrapped__)(W, X).records} == {"forward"}


# Arguments


def test_shapes_are_enough_and_nothing_is_computed() -> None:
    ran: list[int] = []

    def counting(w: Array, x: Array) -> Array:
        jax.debug.callback(lambda: ran.append(1))
        return loss(w, x)

    shapes = (jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((1 << 20, 4096), jnp.float32))
    report = explain(jax.jit(autocast(counting)))(*shapes)
    jax.effects_barrier()
    assert report.totals.dots[0].count == 1
    assert report.where(dot=True).records[0].shapes_in == ((1 << 20, 4096), (4096, 4096))
    assert ran == []


def test_arguments_that_are_no_arrays_stay_what_they_are() -> None:
    def pick(w: Array, x: Any, *, mode: str, scale: float, flag: bool) -> Array:
        assert (mode, type(scale), flag) == ("sum", float, True)
        return jnp.sum(x["x"] @ w) * scale

    report = explain(autocast(pick))(W, {"x": np.ones((2, 4), np.float32)}, mode="sum", scale=2.0, flag=True)
    assert ops(report) == ["dot_general", "reduce_sum", "mul"]


def test_static_arguments_of_jit_stay_static() -> None:
    step = jax.jit(autocast(lambda w, x, times: jnp.sum((x @ w) * times)), static_argnums=2)
    assert ops(explain(step)(W, X, 3)) == ["dot_general", "mul", "reduce_sum"]


def test_the_function_that_is_returned_is_named_after_the_one_given() -> None:
    assert explain(loss).__name__ == "loss"
    assert explain(partial(autocast(loss), W))(X).title == "partial"


# Output


def test_the_report_is_text_of_at_most_100_columns_and_json() -> None:
    report = explain(jax.jit(jax.value_and_grad(autocast(loss))))(W, X)
    text = str(report)
    assert text.startswith("loss: bfloat16, policy default\n  dots       1  bfloat16 x bfloat16 -> bfloat16\n")
    assert max(map(len, text.splitlines())) <= 100
    assert "f32>bf16 f32>bf16 -> bf16" in text
    assert json.loads(json.dumps(report.as_dict()))["framework"] == "jax"
    assert {row["region"] for row in report.rows()} == {"loss"}


# Wrong calls


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"explain takes a function, got ArrayImpl: explain\(loss\)\(params, batch\)\."
    ):
        explain(W)  # type: ignore[arg-type]


def test_options_are_those_of_autocast_and_checked_at_once() -> None:
    with pytest.raises(DtypeError, match="float32"):
        explain(loss, dtype="float32")
    with pytest.raises(TypeError, match="spam"):
        explain(loss, spam=1)


def test_options_for_a_function_with_autocast_are_refused() -> None:
    with pytest.raises(OptionError, match="explain was given dtype, and loss applies autocast itself"):
        explain(autocast(loss), dtype="float16")(W, X)


def test_a_function_that_looks_at_numbers_is_told_what_explain_does() -> None:
    def train(w: Array, x: Array) -> float:
        return float(autocast(loss)(w, x))

    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        explain(train)(W, X)
    assert "Give it what you would give jax.jit" in "".join(caught.value.__notes__)


def test_errors_of_the_function_come_through() -> None:
    def wrong(x: Array) -> Array:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        explain(autocast(wrong))(X)
