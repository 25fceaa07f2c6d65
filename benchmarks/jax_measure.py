"""What a worker measures of a JAX model: times of all ways in turn, and what their programs say of themselves."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import jax

from benchmarks.jax_cases import COMPILED, JaxPlan
from benchmarks.jax_counts import count, residual_bytes
from benchmarks.jax_models import Model
from benchmarks.jax_ways import WAYS, LeftOutError, Way, relative_error
from benchmarks.pairing import next_iterations

Timed = Callable[[], Any]

_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def measure_steps(model: Model, plan: JaxPlan) -> dict[str, Any]:
    """Loss and gradients, compiled, in each way that works."""
    arguments = model.arguments(0)
    programs: dict[str, Callable[..., Any]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name in WAYS if plan.everything else COMPILED:
        try:
            programs[name], facts[name] = _compiled(WAYS[name], model, arguments)
        except LeftOutError:
            continue
        except Exception as error:
            # Whatever a peer raises is its row; mezzo and what it is held against must work.
            if name in ("float32", *COMPILED):
                raise
            facts[name] = {"failed": _in_a_line(error)}
    for seed in range(plan.seeds if plan.everything else 0):
        _compare_gradients(programs, facts, model.arguments(seed))
    timed = {name: _call_of(program, arguments) for name, program in programs.items()}
    return {"facts": facts, "runs": _rounds(timed, plan), "builds": _builds(model, arguments, programs, plan)}


def measure_calls(model: Model, plan: JaxPlan) -> dict[str, Any]:
    """The loss alone, jitted and not."""
    arguments = model.arguments(0)
    timed = {}
    for name in ("float32", *COMPILED):
        loss = WAYS[name].loss(model)
        if loss is not None:
            timed[name] = _call_of(loss, arguments)
            timed[f"{name}, jitted"] = _call_of(jax.jit(loss), arguments)
    return {"runs": _rounds(timed, plan)}


def _compiled(way: Way, model: Model, arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], dict[str, Any]]:
    loss = way.loss(model)
    traced = jax.jit(way.step(model)).trace(*arguments)
    program = traced.lower().compile()
    analysis = program.memory_analysis()
    facts: dict[str, Any] = {
        **count(traced.jaxpr.jaxpr),
        "residual_bytes": None if loss is None else residual_bytes(loss, *arguments),
        "temporary_bytes": None if analysis is None else analysis.temp_size_in_bytes,
        "errors": [],
    }
    return program, facts


def _in_a_line(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "not installed"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{'...' if len(text) > 160 else ''}"


def _compare_gradients(
    programs: Mapping[str, Callable[..., Any]], facts: Mapping[str, dict[str, Any]], arguments: tuple[Any, ...]
) -> None:
    _, exact = programs["float32"](*arguments)
    for name, program in programs.items():
        facts[name]["errors"].append(relative_error(program(*arguments)[1], exact))


def _call_of(program: Callable[..., Any], arguments: tuple[Any, ...]) -> Timed:
    return lambda: jax.block_until_ready(program(*arguments))


def _rounds(timed: Mapping[str, Timed], plan: JaxPlan) -> list[dict[str, float]]:
    """Seconds a call of each way, round by round; every second round runs backwards."""
    clock = _CLOCKS[plan.clock]
    iterations, turn = {}, 0.0
    for name, call in timed.items():
        call()
        seconds = _turn(call, 1, clock)
        iterations[name] = next_iterations(seconds, 1, plan.seconds)
        turn += seconds * iterations[name]
    found = []
    for index in range(plan.warmup + max(plan.least_rounds, min(plan.rounds, int(plan.budget / turn)))):
        order = list(timed) if index % 2 == 0 else list(timed)[::-1]
        gc.collect()
        found.append({name: _turn(timed[name], iterations[name], clock) / iterations[name] for name in order})
    return found[plan.warmup :]


def _turn(call: Timed, iterations: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(iterations):
        call()
    return clock() - start


def _builds(
    model: Model, arguments: tuple[Any, ...], programs: Mapping[str, Any], plan: JaxPlan
) -> list[dict[str, list[float]]]:
    """Seconds of tracing, lowering and compiling a function made anew, with nothing left from the one before."""
    names = [name for name in COMPILED if name in programs]
    return [
        {name: _build(WAYS[name], model, arguments, plan) for name in (names if index % 2 == 0 else names[::-1])}
        for index in range(plan.builds)
    ]


def _build(way: Way, model: Model, arguments: tuple[Any, ...], plan: JaxPlan) -> list[float]:
    jax.clear_caches()
    gc.collect()
    clock = _CLOCKS[plan.clock]
    step = jax.jit(way.step(model))
    times = [clock()]
    traced = step.trace(*arguments)
    times.append(clock())
    lowered = traced.lower()
    times.append(clock())
    lowered.compile()
    times.append(clock())
    return [later - earlier for earlier, later in pairwise(times)]
