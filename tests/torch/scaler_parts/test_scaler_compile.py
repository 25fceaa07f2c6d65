"""A scaler in and around compiled code: a full graph that scales, steps of compiled optimizers, the scale as it moves."""

from __future__ import annotations

import math
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mezzo
from mezzo.torch import GradScaler, autocast

NO_COMPILER = "needs a C++ compiler: Inductor compiles what it generates for the CPU"
HAS_COMPILER = bool(shutil.which("g++") or shutil.which("clang++"))
BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(not HAS_COMPILER, reason=NO_COMPILER)),
]
# Inductor uses what PyTorch's own notice advises against; Dynamo reads the .grad of a loss, to run its backward().
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

INF = math.inf
RUN = [1.0, INF, 1.0, 1.0, 1.0, math.nan, INF, 1.0, 1.0, 1.0, 1.0, 1.0]

backends = pytest.mark.parametrize("backend", BACKENDS)

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Losses:
    main: Tensor
    other: Tensor


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


# Scaling


def test_the_first_scaling_is_in_a_full_graph_and_makes_the_scale():
    scaler = GradScaler("cpu", init_scale=8.0)
    scaled = torch.compile(lambda x: scaler.scale(x * 2) + 1, backend="aot_eager", fullgraph=True)
    assert scaled(torch.tensor(3.0)) == 49.0
    assert scaler.get_scale() == 8.0
    assert scaler._get_growth_tracker() == 0
    assert scaled(torch.tensor(3.0)) == 49.0


def test_pytorchs_scaler_breaks_the_graph():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="skip"):
        torch.compile(lambda x: scaler.scale(x * 2) + 1, backend="eager", fullgraph=True)(torch.tensor(3.0))


@backends
def test_a_scale_that_moved_is_used_without_compiling_anew(backend):
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaled = torch.compile(scaler.scale, backend=backend, fullgraph=True)
    assert scaled(torch.tensor(3.0)) == 24.0
    with torch.compiler.set_stance("fail_on_recompile"):
        scaler.update(16.0)
        assert scaled(torch.tensor(3.0)) == 48.0
        scaler.update(torch.tensor(2.0))
        assert scaled(torch.tensor(3.0)) == 6.0
        scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0})
        assert scaled(torch.tensor(3.0)) == 96.0
        scaler._scale = torch.tensor(64.0)  # another tensor, as code that knows PyTorch's class may set it
        assert scaled(torch.tensor(3.0)) == 192.0


def test_two_scalers_in_one_function_are_told_apart():
    scalers = [GradScaler("cpu", init_scale=2.0), GradScaler("cpu", init_scale=32.0), GradScaler("cpu", enabled=False)]
    scaled = torch.compile(lambda scaler, x: scaler.scale(x) * 1, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert [scaled(scaler, torch.tensor(1.0)).item() for scaler in scalers] == [2.0, 32.0, 1.0]


@pytest.mark.parametrize(
    "outputs",
    [
        lambda a, b: [a, (b,)],
        lambda a, b: {"a": a, "b": [b]},
        Pair,
        Losses,
    ],
    ids=["list", "dict", "namedtuple", "dataclass"],
)
def test_containers_are_scaled_in_a_full_graph(outputs):
    def function(a: Tensor, b: Tensor) -> Any:
        return scaler.scale(outputs(a, b))

    scaler = GradScaler("cpu", init_scale=8.0)
    arguments = torch.ones(2), torch.full((), 2.0)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*arguments)
    eager = function(*arguments)
    assert type(compiled) is type(eager)
    assert str(compiled) == str(eager)


@backends
def test_a_full_graph_with_a_region_and_a_scale_gives_the_gradients_of_eager_code(backend):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    x = torch.randn(16, 8)
    scaler = GradScaler("cpu", init_scale=2.0**12)

    def loss() -> Tensor:
        with autocast("cpu", dtype=torch.float16):
            return scaler.scale(net(x).float().square().mean())

    gradients = []
    for call in (loss, torch.compile(loss, backend=backend, fullgraph=True)):
        net.zero_grad()
        call().backward()
        gradients.append([parameter.grad / 2.0**12 for parameter in net.parameters()])
    # Inductor fuses, and rounds to float16 less often.
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-2, atol=1e-3)


# Steps


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def train(
    kind: type[torch.amp.GradScaler], optimizer_of: Callable[..., Any], *, wrap: str | None, compiled: Compiler
) -> tuple[list[float], list[Tensor]]:
    """Train a small net; ``wrap`` says what is compiled. Gives the scales and the parameters."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = optimizer_of(net.parameters())
    scaler = kind("cpu", init_scale=2.0**12, growth_interval=3)
    if wrap == "optimizer.step":
        optimizer.step = compiled(optimizer.step)
    if wrap == "a function that calls it":
        original = optimizer.step

        def call_it() -> None:
            original()

        optimizer.step = compiled(call_it)

    def forward(x: Tensor, factor: Tensor) -> Tensor:
        return scaler.scale(net(x).square().mean() * factor)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    def unscale_and_step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        step()

    def everything(x: Tensor, factor: Tensor) -> None:
        optimizer.zero_grad()
        forward(x, factor).backward()
        step()

    call = {"step": compiled(step), "unscale_": compiled(unscale_and_step)}.get(wrap or "", step)
    whole = compiled(everything) if wrap == "everything" else None
    scales = []
    for factor in RUN:
        x, scaled = torch.randn(2, 4), torch.tensor(factor)
        if whole is not None:
            whole(x, scaled)
        else:
            optimizer.zero_grad()
            forward(x, scaled).backward()
            call()
        scales.append(scaler.get_scale())
    return scales, [parameter.detach().clone() for parameter in net.parameters()]


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class CompiledRun(NamedTuple):
    """What a training with compiled parts gave, and what the compiler counted."""

    scales: list[float]
    parameters: list[Tensor]
    breaks: int
    frames: int
    calls_captured: int


@cache
def compiled_run(kind: type[torch.amp.GradScaler], optimizer: str, wrap: str) -> CompiledRun:
    """Train with compiled parts, once for all tests that look at it."""
    torch.compiler.reset()
    counters.clear()
    scales, parameters = train(
        kind, OPTIMIZERS[optimizer], wrap=wrap, compiled=lambda function: torch.compile(function, backend="aot_eager")
    )
    counted = sum(counters["graph_break"].values()), counters["frames"]["total"], counters["stats"]["calls_captured"]
    return CompiledRun(scales, parameters, *counted)


@pytest.mark.parametrize("wrap", ["step", "unscale_", "everything", "optimizer.step", "a function that calls it"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_compiled_steps_train_as_eager_ones_of_pytorchs_scaler_do(optimizer, wrap):
    scales, parameters = train(
        torch.amp.GradScaler,
        OPTIMIZERS[optimizer],
        wrap="unscale_" if wrap == "unscale_" else None,
        compiled=eager,
    )
    found = compiled_run(GradScaler, optimizer, wrap)
    assert found.scales == scales
    assert len(set(scales)) == 3
    # A compiled optimizer computes its corrections in float32 tensors, and not in Python's float64.
    torch.testing.assert_close(found.parameters, parameters, rtol=1e-5, atol=2e-6)


@pytest.mark.skipif(not HAS_COMPILER, reason=NO_COMPILER)
def test_steps_compiled_by_inductor_train_as_eager_ones_do():
    make = OPTIMIZERS["SGD"]
    expected = train(torch.amp.GradScaler, make, wrap=None, compiled=eager)
    scales, parameters = train(GradScaler, make, wrap="everything", compiled=torch.compile)
    assert scales == expected[0]
    torch.testing.assert_close(parameters, expected[1], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("wrap", ["step", "unscale_", "everything"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_more_graph_breaks_and_frames_than_under_pytorchs_scaler(optimizer, wrap):
    theirs, ours = (compiled_run(kind, optimizer, wrap) for kind in (torch.amp.GradScaler, GradScaler))
    assert theirs.breaks > 0
    assert ours.breaks <= theirs.breaks
    assert ours.frames <= theirs.frames


def test_an_optimizers_arithmetic_is_compiled_where_it_is_under_pytorchs_scaler():
    theirs, ours = (compiled_run(kind, "AdamW foreach", "step") for kind in (torch.amp.GradScaler, GradScaler))
    assert theirs.calls_captured > 10
    assert ours.calls_captured == theirs.calls_captured


def test_an_error_in_a_compiled_step_is_the_same_error():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = GradScaler("cpu")
    with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
        torch.compile(lambda: scaler.step(optimizer), backend="eager")()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update\(\)"):
        torch.compile(lambda: scaler.step(optimizer), backend="eager")()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_closure_whose_scaling_is_compiled(set_to_none: bool) -> None:
    """Nobody can watch such gradients come: unscaled if all of them are new, refused if they were added to others."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu", init_scale=1024.0)
    compiled = torch.compile(lambda x: scaler.scale(x.sum()), backend="eager", fullgraph=True)

    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        compiled(weight).backward()
        return weight.detach().sum()

    scaler.step(optimizer, closure)
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]
    if set_to_none:
        scaler.step(optimizer, closure)
        assert weight.tolist() == [0.0, 0.0]
    else:
        with pytest.raises(mezzo.ScalerProtocolError, match="A closure whose scale"):
            scaler.step(optimizer, closure)
        assert weight.tolist() == [0.5, 0.5]


def test_a_second_unscale_after_compiled_scaling_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu", init_scale=1024.0)
    compiled = torch.compile(lambda x: scaler.scale(x.sum()), backend="eager", fullgraph=True)
    compiled(weight).backward()
    scaler.unscale_(optimizer)
    compiled(weight).backward()
    with pytest.raises(mezzo.ScalerProtocolError, match=r"unscale_\(\) has already been called on this optimizer"):
        scaler.unscale_(optimizer)
