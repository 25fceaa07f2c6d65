"""Compiled and exported code: what holds today. One policy per compiled function is a known limit, see docs/amp.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mezzo.torch import autocast

POLICIES = [None, "torch", "unified", "fp32"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.Softmax(-1))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_region_around_a_compiled_function_means_what_it_means_in_eager(net, policy, low) -> None:
    x = torch.randn(4, 8)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with autocast("cpu", dtype=low, policy=policy):
        eager, fast = net(x), compiled(x)
    assert fast.dtype == eager.dtype
    assert torch.equal(fast, eager)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_region_inside_a_compiled_function_runs_in_eager_and_is_right(net, policy) -> None:
    x = torch.randn(4, 8)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", dtype=torch.bfloat16, policy=policy):
            return net(x)

    fast = torch.compile(inside, backend="aot_eager")(x)
    eager = inside(x)
    assert fast.dtype == eager.dtype
    assert torch.equal(fast, eager)
    assert not torch.is_autocast_enabled("cpu")


def test_a_decorated_forward_compiles_to_the_same_numbers(net) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        @autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    model, x = Model(), torch.randn(4, 8)
    fast = torch.compile(model, backend="aot_eager")(x)
    assert fast.dtype == torch.bfloat16
    assert torch.equal(fast, model(x))


def test_export_records_a_region_as_pytorchs_own() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with autocast("cpu", dtype=torch.bfloat16):
                return x @ x

    x = torch.randn(4, 4)
    program = torch.export.export(Model(), (x,))
    assert any(
        "wrap_with_autocast" in str(node.target) or "WrapWithAutocast" in str(node.target)
        for node in program.graph.nodes
    )
    assert torch.equal(program.module()(x), Model()(x))
