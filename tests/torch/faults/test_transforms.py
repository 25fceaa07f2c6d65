"""Section D: backward passes that are compiled, and transforms of autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from .amps import Amp, assert_near, low_dtypes


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Protected(nn.Module):
    """A net in the midst of which a layer, or an attention, is kept in full precision."""

    def __init__(self, island: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.island = island

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh().float()
        with self.island():
            hidden = self.middle(hidden).tanh()
            hidden = (hidden @ hidden.mT).softmax(-1) @ hidden
        return self.last(hidden).float().square().mean()


ISLANDS: dict[str, Callable[[Amp], Callable[[], Any]]] = {
    "island": lambda amp: amp.island,
    "disabled": lambda amp: lambda: amp.region(enabled=False),
}


def gradients(net: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, region: Any) -> list[Tensor]:
    """Run forward in the region and backward outside of it."""
    net.zero_grad()
    with region:
        loss = call(x)
    loss.backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


@low_dtypes
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("fullgraph", [True, False], ids=["fullgraph", "breaks allowed"])
@pytest.mark.parametrize("island", ISLANDS.values(), ids=ISLANDS)
def test_d1_compiled_backward_is_eagers(
    amp: Amp, low: torch.dtype, fullgraph: bool, island: Callable[[Amp], Callable[[], Any]]
) -> None:
    """D1, top 15 no. 9: the backward pass of a protected stretch is as precise in compiled code as in eager code."""
    net, x = Protected(island(amp)), torch.randn(8, 16)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=fullgraph)
    reference = gradients(net, net, x, amp.region(low, enabled=False))
    eager = gradients(net, net, x, amp.region(low))
    got = gradients(net, compiled, x, amp.region(low))
    for one, other, exact in zip(got, eager, reference, strict=True):
        assert_near(one, exact, torch.float32, computed=low)
        assert torch.equal(one, other)


# Top 15 no. 13: transforms of autograd over normalization layers

NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(8),
    "batch norm": lambda: nn.BatchNorm1d(8).eval(),
    "group norm": lambda: nn.GroupNorm(2, 8),
}


def per_sample_gradients(net: nn.Module, x: Tensor) -> Tensor:
    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(net, weights, (sample[None],)).float().square().sum()

    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    return vmap(grad(loss), (None, 0))(weights, x)["0.weight"]


def jacobian(net: nn.Module, x: Tensor) -> Tensor:
    return jacrev(lambda sample: net(sample[None])[0])(x[0])


def jacobian_of_weights(net: nn.Module, x: Tensor) -> Tensor:
    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    return jacrev(lambda given: functional_call(net, given, (x,)))(weights)["0.weight"]


def batched_backward(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    result = net(x)
    basis = torch.eye(result.numel(), dtype=result.dtype).view(-1, *result.shape)
    return vmap(lambda row: torch.autograd.grad(result, x, row, retain_graph=True)[0])(basis)


# Those that raise in a region of PyTorch's: its group norm is refused in the last one alone.
TRANSFORMS = [
    (norm, transform)
    for norm in NORMS
    for transform in (per_sample_gradients, jacobian, jacobian_of_weights, batched_backward)
    if norm != "group norm" or transform is batched_backward
]


@low_dtypes
@pytest.mark.parametrize(
    ("norm", "transform"), TRANSFORMS, ids=[f"{norm}-{transform.__name__}" for norm, transform in TRANSFORMS]
)
def test_top13_transforms_over_normalization(
    amp: Amp, low: torch.dtype, norm: str, transform: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """Top 15 no. 13: per-sample gradients and Jacobians through normalization layers are those of float32."""
    net, x = nn.Sequential(nn.Linear(8, 8), NORMS[norm](), nn.Linear(8, 3)), torch.randn(4, 8)
    reference = transform(net, x)
    with amp.region(low):
        got = transform(net, x)
    assert_near(got, reference, torch.float32, computed=low)
