"""The JAX benchmarks: that every way computes the same loss, and that programs are counted right."""

# ruff: noqa: E402 - without JAX this file is skipped before it imports what needs it.
from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("rich")

import jax.numpy as jnp
from benchmarks import jax_models
from benchmarks.jax_cases import AROUND, HAND, MEZZO, TITLES, JaxPlan
from benchmarks.jax_counts import count, residual_bytes
from benchmarks.jax_measure import measure_calls, measure_steps
from benchmarks.jax_models import LOW, MODELS, Model
from benchmarks.jax_ways import WAYS, relative_error

PLAN = JaxPlan(
    rounds=2, least_rounds=2, budget=0.1, warmup=1, seconds=0.001, builds=1, seeds=1, everything=True, clock="wall"
)


def counted(function: Any, *arguments: Any) -> dict[str, int]:
    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


def shapes_of(model: Model) -> Any:
    return jax.eval_shape(lambda *given: given, *model.arguments(0))


def test_casts_and_products_are_counted_in_inner_programs_too() -> None:
    def body(x: Any, w: Any) -> Any:
        return (x.astype(LOW) @ w.astype(LOW)).astype(jnp.float32), None

    def function(x: Any, w: Any) -> Any:
        x, _ = jax.lax.scan(body, x @ w[0], w)
        return x

    found = counted(function, jnp.ones((2, 2)), jnp.ones((5, 2, 2)))
    # Once, though the body runs five times.
    assert (found["converts"], found["products"], found["low_products"]) == (3, 2, 1)


def test_integers_are_not_cast_and_what_nobody_uses_does_not_count() -> None:
    def function(x: Any, ids: Any) -> Any:
        x.astype(LOW).astype(jnp.float32).sum()
        return x * ids.astype(jnp.float32)

    found = counted(function, jnp.ones(3), jnp.arange(3))
    assert found["converts"] == 0
    assert found["equations"] == 2


def test_the_bytes_kept_for_the_backward_pass() -> None:
    """Of ``sin`` its cosine, in float32 or bfloat16; nothing of a sum."""
    x = jnp.ones((8, 16))
    assert residual_bytes(lambda given: jnp.sum(jnp.sin(given)), x) == 4 * x.size
    assert residual_bytes(lambda given: jnp.sum(jnp.sin(given.astype(LOW))), x) == 2 * x.size


@pytest.mark.parametrize("name", ["transformer", "scan"])
def test_norms_in_float32_are_the_same_program_in_float32(name: str) -> None:
    model = MODELS[name]
    shapes = shapes_of(model)
    assert str(jax.make_jaxpr(model.loss)(*shapes)) == str(jax.make_jaxpr(model.float32_norms)(*shapes))


@pytest.mark.parametrize("name", list(MODELS))
def test_by_hand_all_products_are_in_bfloat16_and_the_loss_in_float32(name: str) -> None:
    model = MODELS[name]
    shapes = shapes_of(model)
    assert jax.eval_shape(model.by_hand, *shapes).dtype == jnp.float32
    exact, found = counted(model.loss, *shapes), counted(model.by_hand, *shapes)
    assert (exact["low_products"], exact["converts"]) == (0, 0)
    assert found["low_products"] == found["products"] == exact["products"] > 0


def test_scanned_written_out_and_by_hand_the_transformer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 to its rounding, by hand to that of bfloat16, which has 8 bits; made small, for it is compiled."""
    for name, size in {"LAYERS": 2, "WIDTH": 32, "LENGTH": 8, "BATCH": 2, "TOKENS": 16}.items():
        monkeypatch.setattr(jax_models, name, size)
    model, written_out = MODELS["scan"], MODELS["transformer"]
    arguments = model.arguments(0)
    exact = float(jax.jit(model.loss)(*arguments))
    assert exact > 1.0
    assert float(jax.jit(model.by_hand)(*arguments)) == pytest.approx(exact, rel=2e-2)
    assert float(jax.jit(written_out.loss)(*written_out.arguments(0))) == pytest.approx(exact, rel=1e-5)


def test_every_way_is_measured_or_says_why_not() -> None:
    found = measure_steps(MODELS["call"], PLAN)
    facts = found["facts"]
    # A model without norms has no row for them.
    assert facts.keys() == TITLES.keys() - {"jmp-norms"}
    worked = {way for way, each in facts.items() if "failed" not in each}
    assert worked >= {"float32", HAND, MEZZO, AROUND}
    assert all(len(facts[way]["errors"]) == PLAN.seeds for way in worked)
    assert facts["float32"]["errors"] == [0.0]
    for way in worked - {"float32"}:
        assert facts[way]["low_products"] == facts[way]["products"]
        assert 0.0 < max(facts[way]["errors"]) < 0.05, way
    assert [one.keys() for one in found["runs"]] == [worked, worked]
    assert all(seconds > 0.0 for one in found["builds"] for times in one.values() for seconds in times)


def test_a_call_is_measured_jitted_and_not() -> None:
    found = measure_calls(MODELS["call"], PLAN)
    names = {"float32", HAND, "control", MEZZO}
    assert all(one.keys() == names | {f"{name}, jitted" for name in names} for one in found["runs"])


def test_a_step_made_again_is_traced_again() -> None:
    """Else nothing would be built the second time."""
    model = MODELS["call"]
    arguments = model.arguments(0)
    for way in (HAND, MEZZO, AROUND):
        first, second = (WAYS[way].step(model) for _ in range(2))
        assert first is not second
        assert jax.jit(first).trace(*arguments).jaxpr is not jax.jit(second).trace(*arguments).jaxpr


def test_the_relative_error_of_a_tree() -> None:
    exact = {"a": jnp.array([3.0]), "b": jnp.array([0.0, 4.0])}
    assert relative_error(exact, exact) == 0.0
    assert relative_error({"a": jnp.array([3.0]), "b": jnp.array([0.5, 4.0])}, exact) == pytest.approx(0.1)
