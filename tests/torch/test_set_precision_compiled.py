"""Compiled models follow the rules of `set_precision`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import autocast, set_precision

from .named_model import LOW, output


@pytest.fixture
def _fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Where a graph breaks, Dynamo looks at the grad of tensors that have none, and PyTorch warns.
at_breaks = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
RULES = [{"2": "fp32"}, {"**": "unified", "2": {"linear": "fp32"}}]


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 2))


@at_breaks
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("fullgraph", [True, False], ids=["one graph", "graphs"])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_compiled_model_follows_its_rules(rules: Any, fullgraph: bool) -> None:
    net, x = small_net(), torch.rand(2, 4)
    set_precision(net, rules)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=fullgraph)
    assert torch.equal(compiled(x), net(x))
    for policy in ("torch", "unified"):
        expected = output(net, x, policy=policy)
        expected.sum().backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        net.zero_grad()
        got = output(compiled, x, policy=policy)
        got.sum().backward()
        assert got.dtype is torch.float32
        assert torch.equal(got, expected)
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=0, rtol=0)
        net.zero_grad()


@at_breaks
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("fullgraph", [True, False], ids=["one graph", "graphs"])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_compiled_region_follows_the_rules_of_the_model_in_it(rules: Any, fullgraph: bool) -> None:
    net, x = small_net(), torch.rand(2, 4)
    set_precision(net, rules)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        with autocast("cpu", dtype=LOW, policy="torch"):
            return net(x), net[0](x) @ x.mT

    expected = step(x)
    got = torch.compile(step, backend="aot_eager", fullgraph=fullgraph)(x)
    assert got[0].dtype is torch.float32
    assert got[1].dtype is LOW
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


class Breaking(nn.Module):
    """Cannot be traced in one piece, and calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            x = self(x, depth - 1)
        torch._dynamo.graph_break()
        return self.linear(x)


@at_breaks
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_forward_that_breaks_the_graph_follows_its_rules() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(Breaking(), nn.Linear(4, 4)), torch.rand(2, 4)
    set_precision(net, {"0": "fp32"})
    compiled = torch.compile(net, backend="aot_eager")
    expected = output(net, x)
    assert expected.dtype is LOW
    for _ in range(2):
        assert torch.equal(output(compiled, x), expected)
