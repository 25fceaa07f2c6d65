"""Compiled models at O1 and O2: they train as the eager ones, and are not compiled again at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.apex import amp

from .loops import copies
from .nets import batch, scale, sgd

# Four times the digits of float16, of weights below 0.5 after ten steps; compiled code rounds in other places.
TOLERANCE = 4 * 2**-11


class Counting:
    """The backend "aot_eager", which counts what it is given to compile."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.count += 1
        return aot_eager(graph, inputs)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def net(*, norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.ReLU(), nn.Linear(16, 4)]
    return nn.Sequential(*layers)


def train(model: nn.Module, optimizer: Any, steps: range, *, backend: Counting | None = None) -> list[int]:
    """Train; give how often the backend had been called after each step."""
    counts = []
    for seed in steps:
        inputs, labels = batch(seed)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if seed == 3:
                first = next(iter(amp.master_params(optimizer)))
                assert first.grad is not None
                first.grad.flatten()[0] = torch.inf
        optimizer.step()
        counts.append(0 if backend is None else backend.count)
    return counts


def start(level: str, when: str, backend: Any, **options: Any) -> tuple[nn.Module, Any]:
    """Compile before ``initialize``, after it, in place, or not at all."""
    model: Any = net()
    optimizer = sgd(model, lr=0.05)
    if when == "before":
        model = torch.compile(model, backend=backend)
    elif when == "in place":
        model.compile(backend=backend)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0, **options)
    if when == "after":
        model = torch.compile(model, backend=backend)
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("when", ["before", "after", "in place"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_compiled_model_trains_as_the_eager_one(level: str, when: str, dtype: torch.dtype) -> None:
    model, optimizer = start(level, "never", None, dtype=dtype)
    train(model, optimizer, range(10))
    wanted = copies(amp.master_params(optimizer))
    backend = Counting()
    model, optimizer = start(level, when, backend, dtype=dtype)
    counts = train(model, optimizer, range(10), backend=backend)
    assert counts[0] > 0
    assert counts[2:] == [counts[1]] * 8
    assert scale() == 32768.0
    digits = TOLERANCE if dtype is torch.float16 else 8 * TOLERANCE
    for one, other in zip(amp.master_params(optimizer), wanted, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=0.0, atol=digits * (4 if level == "O3" else 1))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_evaluation_between_steps_is_compiled_once(level: str) -> None:
    backend = Counting()
    model, optimizer = start(level, "after", backend)
    seen = []
    for round_ in range(4):
        train(model, optimizer, range(10 * round_, 10 * round_ + 3), backend=backend)
        model.eval()
        with torch.no_grad():
            outputs = model(batch()[0])
        assert outputs.dtype is (torch.float32 if level == "O2" else torch.float16)
        model.train()
        seen.append(backend.count)
    assert seen[1:] == [seen[1]] * 3


class Loss(nn.Module):
    """A model and its loss in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(norm=False)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = nn.functional.cross_entropy(self.net(inputs), labels)
        return result


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_casts_in_the_graph_are_those_of_the_level(level: str) -> None:
    dtypes: list[set[torch.dtype]] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        dtypes.append(
            {
                node.meta["example_value"].dtype
                for node in graph.graph.nodes
                if node.op == "call_function" and isinstance(node.meta.get("example_value"), Tensor)
            }
        )
        return graph

    model = Loss()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    compiled: Any = torch.compile(model, backend=backend)
    loss = compiled(*batch())
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert loss.dtype is torch.float32
    assert torch.float16 in set().union(*dtypes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # PyTorch's own use
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_inductor_trains_as_eager(level: str) -> None:
    model, optimizer = start(level, "never", None)
    train(model, optimizer, range(10))
    wanted = copies(amp.master_params(optimizer))
    model, optimizer = start(level, "after", "inductor")
    train(model, optimizer, range(10))
    assert scale() == 32768.0
    for one, other in zip(amp.master_params(optimizer), wanted, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=0.0, atol=TOLERANCE)
