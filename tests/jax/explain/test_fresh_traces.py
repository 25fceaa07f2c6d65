"""What JAX has traced and compiled before is traced again for the report, and is neither lost nor added to."""

from __future__ import annotations

import threading
from typing import Any

import jax
import pytest
from jax import Array, lax
from jax import numpy as jnp

from mezzo.jax import autocast
from mezzo.jax.explain import explain

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))


class Counted:
    """A jitted train step around autocast that counts how often its parts are traced."""

    def __init__(self) -> None:
        self.traces = {"helper": 0, "loss": 0, "step": 0}

        @jax.jit
        def helper(h: Array) -> Array:
            self.traces["helper"] += 1
            return h.astype(jnp.float32) - 1.0

        def loss(w: Array, x: Array) -> Array:
            self.traces["loss"] += 1
            h, _ = lax.scan(lambda h, _: (helper(h @ w), None), x, None, length=2)
            return jnp.sum(helper(h @ w))

        @jax.jit
        def step(w: Array, x: Array) -> Array:
            self.traces["step"] += 1
            return jax.grad(autocast(loss))(w, x)

        self.helper, self.step = helper, step


def test_a_step_that_was_compiled_is_seen_as_well_and_stays_compiled() -> None:
    one = Counted()
    one.step(W, X)
    before = dict(one.traces)
    report = explain(one.step)(W, X)
    assert [region.name for region in report.regions] == ["loss"]
    assert report.dots[0].runs == 3
    assert len(report.warnings) == 1
    after = dict(one.traces)
    assert all(after[name] > before[name] for name in before)
    one.step(W, X)
    one.helper(X)
    assert one.traces == {**after, "helper": after["helper"]}
    assert one.step._cache_size() == 1


def test_a_second_report_says_the_same_as_the_first() -> None:
    one = Counted()
    first = explain(one.step)(W, X)
    second = explain(one.step)(W, X)
    assert first == second
    assert one.step._cache_size() == 0


def test_the_traces_of_a_report_are_not_what_runs_later() -> None:
    one = Counted()
    explain(one.step)(W, X)
    traced = one.traces["step"]
    text = one.step.lower(W, X).as_text()
    assert one.traces["step"] == traced + 1
    assert "mezzo_explain" not in text
    assert "invisible" not in str(jax.make_jaxpr(one.step)(W, X))


def test_explaining_leaves_numbers_alone() -> None:
    one, other = Counted(), Counted()
    explain(one.step)(W, X)
    assert jnp.array_equal(one.step(W, X), other.step(W, X))


def test_the_users_metadata_is_in_force_again_afterwards() -> None:
    metadata = pytest.importorskip("jax.experimental.xla_metadata").set_xla_metadata
    with metadata(mine="1"):
        explain(Counted().step)(W, X)
        assert "mine" in jax.jit(lambda x: x + 1).lower(X).as_text()


def test_threads_explain_at_once_and_see_their_own() -> None:
    found: dict[int, Any] = {}
    barrier = threading.Barrier(3)

    def work(number: int) -> None:
        w = jnp.ones((4, number + 1))
        barrier.wait()
        found[number] = explain(autocast(lambda w, x: jnp.sum((x @ w).astype(jnp.float32) - 1)))(w, X)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, report in found.items():
        assert [record.shapes_out for record in report.where(dot=True).records] == [((2, number + 1),)]
        assert len(report.warnings) == 1
