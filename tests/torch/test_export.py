"""torch.export of models with regions, and inside of regions."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import RegionError
from mezzo.torch import autocast

LOW = torch.bfloat16

strictness = pytest.mark.parametrize("strict", [False, True])
# PyTorch's own export does this on some versions, in float32 too.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Inside(nn.Module):
    """A net with a region in its forward."""

    def __init__(self, net: nn.Module, policy: str | None) -> None:
        super().__init__()
        self.net, self.policy = net, policy

    def forward(self, x: Tensor) -> Tensor:
        with autocast("cpu", dtype=LOW, policy=self.policy):
            return self.net(x)


@strictness
@pytest.mark.parametrize("policy", [None, "default", "torch"])
def test_an_exported_region_computes_the_same(net, x, policy, strict) -> None:
    model = Inside(net, policy)
    wanted = model(x)
    program = torch.export.export(model, (x,), strict=strict)
    assert any("autocast" in str(node.target) for node in program.graph.nodes)
    for found in (program.module()(x), program.run_decompositions().module()(x)):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("policy", ["unified", "fp32"])
def test_a_policy_that_a_program_cannot_hold_is_refused(net, x, policy) -> None:
    with pytest.raises(RegionError, match=rf"without its policy '{policy}'; .* run_decompositions\(\) .* there"):
        torch.export.export(Inside(net, policy), (x,))
    assert not torch.is_autocast_enabled("cpu")
    torch.clear_autocast_cache()


@strictness
@pytest.mark.parametrize("policy", [None, "unified", "fp32"])
def test_a_program_exported_in_a_region_computes_the_same_there(net, x, policy, strict) -> None:
    region = autocast("cpu", dtype=LOW, policy=policy)
    with region:
        wanted = net(x)
        program = torch.export.export(net, (x,), strict=strict)
        assert torch.equal(program.module()(x), wanted)


@pytest.mark.parametrize("policy", [None, "unified", "fp32"])
def test_a_program_decomposed_in_a_region_has_the_casts_in_it(net, x, policy) -> None:
    with autocast("cpu", dtype=LOW, policy=policy):
        wanted = net(x)
        program = torch.export.export(net, (x,)).run_decompositions()
    for around in (contextlib.nullcontext(), torch.autocast("cpu", dtype=LOW, enabled=False)):
        with around:
            found = program.module()(x)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
