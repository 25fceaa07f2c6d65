"""The ways into a region inside of compiled code, and what happens where the graph breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import autocast, bind

LOW = torch.bfloat16

# Dynamo looks at `.grad` of what comes into the rest of a function whose graph has broken.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    """Two layers, between which the graph may break."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.breaks = nn.Linear(4, 4), nn.Softmax(-1), breaks

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(hidden)


def unified() -> autocast:
    return autocast("cpu", dtype=LOW, policy="unified")


def assert_compiles(function: Callable[..., Any], *, fullgraph: bool) -> None:
    """Check that compiled code gives what eager code does, twice, and leaves no state."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    wanted = function(x)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
    for _ in range(2):
        found = compiled(x)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("breaks", [False, True])
def test_a_decorated_function_compiles(breaks) -> None:
    net = Net(breaks=breaks)
    assert_compiles(unified()(net), fullgraph=not breaks)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_decorated_module_class_compiles(breaks) -> None:
    @unified()
    class Decorated(Net):
        pass

    assert_compiles(Decorated(breaks=breaks), fullgraph=not breaks)


def test_a_decorated_function_that_calls_itself_compiles() -> None:
    net = Net()

    @unified()
    def recursive(x: Tensor, depth: int = 3) -> Tensor:
        return net(x) if depth == 0 else recursive(x, depth - 1) + 1

    assert_compiles(recursive, fullgraph=True)


def test_a_graph_that_breaks_inside_of_a_with_computes_as_eager_code() -> None:
    net = Net(breaks=True)

    def function(x: Tensor) -> Tensor:
        with unified():
            return net(x) + net(x)

    assert_compiles(function, fullgraph=False)


def other_regions() -> dict[str, autocast | torch.autocast]:
    return {
        "dtype": autocast("cpu", dtype=torch.float16),
        "policy": autocast("cpu", dtype=torch.float16, policy="fp32"),
        "off": autocast("cpu", enabled=False),
        "plain": torch.autocast("cpu", dtype=torch.float16),
    }


@pytest.mark.parametrize("around", ["dtype", "policy", "off", "plain"])
def test_a_graph_that_breaks_with_another_region_around_the_compiled_code(around) -> None:
    net = Net(breaks=True)

    def function(x: Tensor) -> Tensor:
        with unified():
            return net(x) + net(x)

    compiled, x = torch.compile(function, backend="eager"), torch.ones(3, 4)
    with other_regions()[around]:
        state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        wanted, found = function(x), compiled(x)
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == state
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("around", ["dtype", "policy", "off", "plain"])
def test_a_region_inside_of_a_plain_one_in_compiled_code(around, enabled) -> None:
    net = Net()

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=LOW, enabled=enabled):
            y = net(x)
            with unified():
                z = net(x)
        return y + z + net(x)

    compiled, x = torch.compile(function, backend="eager", fullgraph=True), torch.ones(3, 4)
    wanted, found = function(x), compiled(x)
    assert torch.equal(found, wanted)
    with other_regions()[around]:
        wanted, found = function(x), compiled(x)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_a_region_made_outside_works_in_a_with() -> None:
    net, region = Net(), unified()

    def function(x: Tensor) -> Tensor:
        with region:
            y = net(x)
        return y + net(x)

    assert_compiles(function, fullgraph=False)


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize(("breaks", "fullgraph"), [(False, True), (False, False), (True, False)])
def test_a_region_entered_and_left_by_calls(made_inside, breaks, fullgraph) -> None:
    net, outside = Net(breaks=breaks), unified()

    def function(x: Tensor) -> Tensor:
        region = autocast("cpu", dtype=LOW, policy="unified") if made_inside else outside
        region.__enter__()
        y = net(x)
        region.__exit__(None, None, None)
        return y + net(x)

    assert_compiles(function, fullgraph=fullgraph)


def hooked(module: nn.Module, region: autocast) -> nn.Module:
    def enter(*_: object) -> None:
        region.__enter__()

    def leave(*_: object) -> None:
        region.__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)
    return module


@pytest.mark.parametrize(("breaks", "fullgraph"), [(False, True), (False, False), (True, False)])
def test_a_region_entered_by_the_hooks_of_a_module(breaks, fullgraph) -> None:
    net = nn.Sequential(nn.Linear(4, 4), hooked(Net(breaks=breaks), unified()), nn.Linear(4, 4))
    assert_compiles(net, fullgraph=fullgraph)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_region_entered_by_the_hooks_of_the_compiled_module(breaks) -> None:
    assert_compiles(hooked(Net(breaks=breaks), unified()), fullgraph=False)


def test_hooks_of_the_compiled_module_itself_are_refused_as_a_whole_graph() -> None:
    # PyTorch compiles each of these hooks by itself; one that enters a region and does not leave it cannot be a graph.
    compiled = torch.compile(hooked(Net(), unified()), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"autocast.__enter__\(\) is called in a function .* without\s+fullgraph=True"):
        compiled(torch.ones(3, 4))


def test_a_bound_function_computes_as_in_eager_code() -> None:
    net = Net()
    with unified():
        bound = bind(net)

    def function(x: Tensor) -> Tensor:
        return bound(x) + net(x)

    assert_compiles(function, fullgraph=False)


def test_an_exception_inside_of_a_graph_leaves_the_region() -> None:
    net = Net()

    def function(x: Tensor) -> Tensor:
        try:
            with unified():
                y = net(x)
                raise ValueError
        except ValueError:
            return y + net(x)

    assert_compiles(function, fullgraph=False)
