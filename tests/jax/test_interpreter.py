"""The walk: what is kept between calls, what is let go, and what the observer hears."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mezzo.jax import autocast
from mezzo.jax.internals import ClosedJaxpr
from mezzo.jax.observing import Event, observe
from mezzo.jax.settings import Settings
from mezzo.jax.values import combine

X = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)


class Heard:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.events: dict[Any, Event] = {}
        self.count = 0

    def tracing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def region(self, name: str, settings: Settings, traced: ClosedJaxpr) -> Callable[[Event], None]:
        self.names.append(name)
        return self.hear

    def hear(self, event: Event) -> None:
        self.count += 1
        self.events[event.key] = event


def heard(function: Callable[..., Any], *arguments: Any, **options: Any) -> Heard:
    observer = Heard()
    with observe(observer):
        jax.make_jaxpr(autocast(function, **options))(*arguments)
    return observer


def test_one_jitted_function_called_twice_is_one_program() -> None:
    inner = jax.jit(lambda x: jnp.tanh(x @ x))
    equations = jax.make_jaxpr(autocast(lambda x: inner(x) + inner(x)))(X).eqns
    first, second = (equation.params["jaxpr"] for equation in equations if equation.primitive.name == "jit")
    assert first is second


def test_a_jitted_function_is_compiled_once_over_many_calls_without_jit_around(
    caplog: pytest.LogCaptureFixture,
) -> None:
    function = autocast(jax.jit(lambda x: x @ x, inline=False))
    with jax.log_compiles():
        first = function(X)
        assert any("Finished XLA compilation" in record.message for record in caplog.records)
        caplog.clear()
        second = function(X)
    assert not [record.message for record in caplog.records if "compilation" in record.message]
    assert (first == second).all()


def test_the_same_function_under_two_policies_gives_two_programs() -> None:
    inner = jax.jit(lambda x: x @ x)
    low = jax.make_jaxpr(autocast(inner))(X)
    exact = jax.make_jaxpr(autocast(inner, policy="fp32"))(X)
    assert "bf16" in str(low)
    assert "bf16" not in str(exact)


def test_an_array_is_let_go_after_its_last_use() -> None:
    alive: list[Any] = []
    references: list[Any] = []

    def count(x: Any) -> Any:
        references.append(weakref.ref(x))
        gc.collect()
        alive.append(sum(reference() is not None for reference in references))
        return x

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), jnp.tanh(x))
        return x

    autocast(chain)(X)
    assert len(alive) == 6
    assert max(alive) <= 3


def test_each_equation_is_heard_of_once() -> None:
    def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.nn.relu(carry @ carry), None

    def function(x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(body, x, None, length=3)
        return jax.lax.cond(y.sum() > 0, lambda y: y @ y, jnp.exp, y)

    observer = heard(function, X)
    assert observer.names == ["function"]
    assert observer.count == len(observer.events)
    dots = [event for event in observer.events.values() if event.primitive == "dot_general"]
    assert [event.path for event in dots] == [("scan",), ("cond branch 1",)]
    assert all(event.used == ("bfloat16", "bfloat16") and event.gave == ("bfloat16",) for event in dots)
    assert all(event.came == ("float32", "float32") == event.traced_in for event in dots)


def test_nobody_hears_after_the_observer_has_gone() -> None:
    observer = heard(lambda x: x @ x, X)
    before = observer.count
    jax.make_jaxpr(autocast(lambda x: x @ x))(X)
    assert observer.count == before


@pytest.mark.parametrize(
    ("primitive", "operands", "expected"),
    [
        ("add", [{1.0}, {2.0}], {3.0}),
        ("sub", [{1.0}, {0.0, 1.0}], {1.0, 0.0}),
        ("mul", [{0.0, 1.0}, {-1e9}], {-0.0, -1e9}),
        ("div", [{1.0}, {4.0}], {0.25}),
        ("div", [{1.0}, {0.0}], None),
        ("neg", [{1.0}], {-1.0}),
        ("select_n", [{0.0}, {-1e9}], {0.0, -1e9}),
        ("exp", [{0.0}], {1.0}),
        ("exp", [{1000.0}], None),
        ("sqrt", [{-1.0}], None),
        ("tan", [{0.0}], None),
        ("add", [set(map(float, range(5))), {0.0, 0.1, 0.2, 0.3}], None),
    ],
)
def test_the_numbers_of_literals_are_followed_through_arithmetic(
    primitive: str, operands: list[set[float]], expected: set[float] | None
) -> None:
    found = combine(primitive, [frozenset(operand) for operand in operands])
    assert found == (None if expected is None else frozenset(expected))
