"""Section A: casts of weights that are stale, of the wrong dtype, or missing where the code runs again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .amps import OTHER, Amp, assert_near, low_dtypes


def swap_data(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        parameter.data = torch.full_like(parameter, 0.25)


def swap_in_place(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()


def follow_average(layer: nn.Module) -> None:
    average = [torch.rand_like(parameter) for parameter in layer.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(list(layer.parameters()), average, 0.5)


def load_reference(layer: nn.Module) -> None:
    layer.load_state_dict({name: torch.rand_like(value) for name, value in layer.state_dict().items()})


CHANGES = {
    "zeroed in place": swap_in_place,
    "data assigned": swap_data,
    "moving average": follow_average,
    "reference loaded": load_reference,
}
LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Linear(8, 8), torch.randn(4, 8)),
    "conv": lambda: (nn.Conv1d(2, 3, 3), torch.randn(2, 2, 8)),
    "transposed conv": lambda: (nn.ConvTranspose2d(2, 3, 2), torch.randn(2, 2, 4, 4)),
}


@low_dtypes
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a1_changed_weight_is_used(amp: Amp, low: torch.dtype, change: Any, make: Any) -> None:
    """A1: weights that change inside a region are seen by the next layer call."""
    layer, x = make()
    with amp.region(low):
        before = layer(x)
        change(layer)
        after = layer(x)
    assert not torch.equal(before, after)
    assert_near(after, layer(x), low)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.05),
    "fused SGD": lambda weights: torch.optim.SGD(weights, lr=0.05, fused=True),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.05),
    "fused AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.05, fused=True),
    "loop Adam": lambda weights: torch.optim.Adam(weights, lr=0.05, foreach=False),
}


def losses(make: Any, region: Any) -> list[float]:
    """Train for six steps, all in one region."""
    torch.manual_seed(1)
    net, x, y = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)), torch.randn(16, 8), torch.randn(16, 2)
    optimizer, found = make(net.parameters()), []
    with region:
        for _ in range(6):
            loss = (net(x).float() - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


@low_dtypes
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a1_training_inside_one_region_learns(amp: Amp, low: torch.dtype, make: Any) -> None:
    """A1, top 15 no. 4: optimizer steps inside the region are seen; the loss falls as it does in float32."""
    reference = losses(make, amp.region(low, enabled=False))
    found = losses(make, amp.region(low))
    assert found[-1] < 0.95 * found[0]
    assert found == pytest.approx(reference, rel=2e-2)


def save_products_and_casts(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._to_copy.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(
    checkpoint,
    use_reentrant=False,
    context_fn=functools.partial(create_selective_checkpoint_contexts, save_products_and_casts),
)


@low_dtypes
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_a2_selective_checkpoints_share_a_layer(amp: Amp, low: torch.dtype, inside: bool) -> None:
    """A2, top 15 no. 11: a layer used in two selective checkpoints has the gradients that it has without them."""
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    reference = torch.autograd.grad((layer(x).sin() + layer(x.neg()).sin()).sum(), [layer.weight])[0]
    with amp.region(low):
        loss = sum(SELECTIVE(lambda y: layer(y).sin(), one) for one in (x, x.neg())).float().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert_near(layer.weight.grad, reference, torch.float32, computed=low)


@low_dtypes
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a4_nested_region_of_another_dtype(amp: Amp, low: torch.dtype, make: Any) -> None:
    """A4, top 15 no. 11: a weight used in a region and in one of another dtype inside it is cast to both."""
    layer, x = make()
    with amp.region(low):
        outer = layer(x)
        with amp.region(OTHER[low]):
            inner = layer(x)
        again = layer(x)
    assert_near(outer, layer(x), low)
    assert_near(inner, layer(x), OTHER[low])
    assert torch.equal(outer, again)


@low_dtypes
def test_a4_gradients_of_both_dtypes_reach_the_weight(amp: Amp, low: torch.dtype) -> None:
    """A4: the gradient of a weight used in both dtypes is the sum of both."""
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    reference = torch.autograd.grad(2 * layer(x).sin().sum(), [layer.weight])[0]
    with amp.region(low):
        loss = layer(x).sin().float().sum()
        with amp.region(OTHER[low]):
            loss = loss + layer(x).sin().float().sum()
    loss.backward()
    assert_near(layer.weight.grad, reference, torch.float32, computed=torch.bfloat16)


@low_dtypes
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a9_a_module_is_traced_in_a_region(amp: Amp, low: torch.dtype, make: Any) -> None:
    """A9: `torch.jit.trace` in a region records the casts; the traced module follows later changes of its weights."""
    layer, x = make()
    with amp.region(low):
        traced = torch.jit.trace(layer, x)
    swap_data(layer)
    other = torch.randn_like(x)
    assert_near(traced(other), layer(other), low)
