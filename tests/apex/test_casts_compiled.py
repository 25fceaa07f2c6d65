"""`torch.compile` under O1: casts are in the graph, and nothing is compiled again at each step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import mezzo.torch
from mezzo.apex.amp import casts
from mezzo.apex.amp.registered import (
    float_function,
    half_function,
    register_half_function,
    take_registrations,
)

low_dtypes = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch.compiler.reset()


def start(low: torch.dtype = torch.float16) -> casts.Handle:
    return casts.start(["cpu"], low, {})


def compiled(function: Any, *, fullgraph: bool = True) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=fullgraph), counter


def work(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = F.linear(x, weight)
    return hidden, hidden.exp()


@low_dtypes
def test_a_function_is_cast_in_its_graph(low: torch.dtype) -> None:
    x, weight = torch.ones(2, 4), nn.Parameter(torch.full((4, 4), 0.1))
    function, counter = compiled(work)
    start(low)
    for _ in range(3):
        got, expected = function(x, weight), work(x, weight)
        assert [one.dtype for one in got] == [low, torch.float32]
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert counter.frame_count == 1


def test_code_compiled_under_o1_is_not_run_without_it() -> None:
    x, weight = torch.ones(2, 4), nn.Parameter(torch.full((4, 4), 0.1))
    function, counter = compiled(work)
    start()
    function(x, weight)
    with casts.disable_casts():
        assert function(x, weight)[0].dtype is torch.float32
    assert function(x, weight)[0].dtype is torch.float16
    casts.stop()
    assert function(x, weight)[0].dtype is torch.float32
    assert counter.frame_count <= 3


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.inner(x), -1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def train(run: Callable[[Tensor], Tensor], net: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        loss = run(torch.full((2, 4), 0.5)).square().mean()
        with casts.without_casts():
            loss.backward()
            optimizer.step()
        casts.forget_weight_casts()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@low_dtypes
@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()", "part"])
def test_a_watched_model_trains_compiled_as_it_does_uncompiled(low: torch.dtype, how: str) -> None:
    losses = []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = Net()
        casts.watch_model(net)
        start(low)
        run: Any = net
        counter = CompileCounterWithBackend("aot_eager")
        if compiles and how == "torch.compile(model)":
            run = torch.compile(net, backend=counter, fullgraph=True)
        elif compiles and how == "model.compile()":
            net.compile(backend=counter, fullgraph=True)
        elif compiles:
            net.first.compile(backend=counter, fullgraph=True)
        losses.append(train(run, net))
        assert counter.frame_count == int(compiles)
        casts.stop()
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("compiles", ["model", "function"])
def test_a_compiled_watched_model_is_cast_in_a_thread_that_was_not_in(compiles: str) -> None:
    net = Net().requires_grad_(False)
    casts.watch_model(net)
    run, counter = compiled(net if compiles == "model" else lambda x: net(x) * 1, fullgraph=False)
    start()
    expected = run(torch.ones(2, 4))
    assert expected.dtype is torch.float16
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            assert torch.equal(pool.submit(run, torch.ones(2, 4)).result(), expected)
        # PyTorch undoes at the end of a compiled call what was entered in it. As scale_loss does:
        pool.submit(casts.ensure_here).result()
        assert pool.submit(lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).dtype).result() is torch.float16
        assert torch.equal(pool.submit(run, torch.ones(2, 4)).result(), expected)
    assert counter.frame_count <= 4


def test_disable_casts_in_compiled_code() -> None:
    @half_function
    def given(x: Tensor) -> Tensor:
        return x + 0

    def function(x: Tensor) -> tuple[Tensor, ...]:
        with casts.disable_casts():
            inside = (x @ x, given(x))
        return (*inside, x @ x, given(x))

    for compile_it in (lambda function: function, lambda function: compiled(function)[0]):
        run = compile_it(function)
        start()
        got = run(torch.ones(2, 2))
        assert [one.dtype for one in got] == [torch.float32] * 2 + [torch.float16] * 2
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16
        casts.stop()
        assert [one.dtype for one in run(torch.ones(2, 2))] == [torch.float32] * 4


def test_decorated_functions_in_compiled_code() -> None:
    @half_function
    def half(x: Tensor, others: list[Tensor]) -> Tensor:
        return x + others[0]

    @casts.disable_casts()
    def plain(x: Tensor) -> Tensor:
        return x @ x

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return half(x, [x]), float_function(torch.add)(x.half(), x.half()), plain(x)

    run, counter = compiled(function)
    start()
    for _ in range(2):
        assert [one.dtype for one in run(torch.ones(2, 2))] == [torch.float16, torch.float32, torch.float32]
    assert counter.frame_count == 1
    casts.stop()
    assert [one.dtype for one in run(torch.ones(2, 2))] == [torch.float32, torch.float16, torch.float32]


def test_registered_functions_in_compiled_code() -> None:
    import types

    library = types.SimpleNamespace(double=lambda x: x + x)
    register_half_function(library, "double")
    register_half_function(torch, "sigmoid")
    run, counter = compiled(lambda x: (library.double(x), torch.sigmoid(x)))
    casts.start(["cpu"], torch.float16, take_registrations())
    for _ in range(2):
        assert [one.dtype for one in run(torch.ones(2, 2))] == [torch.float16, torch.float16]
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*is deprecated:DeprecationWarning")  # of PyTorch's own
def test_a_compiled_optimizer_step_runs_without_casts() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    step, counter = compiled(optimizer.step, fullgraph=False)
    start()
    for _ in range(4):
        weight.grad = torch.ones(2, 2)
        with casts.without_casts():
            step()
    assert torch.equal(weight, torch.full((2, 2), -1.0))
    assert mezzo.torch.active_policy("cpu").name == "apex-o1"
    assert counter.frame_count > 0
