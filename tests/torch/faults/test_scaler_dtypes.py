"""Section E, second part: gradients in dtypes that PyTorch's scaler refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from .amps import Amp
from .training import backward, layers, plain, weight

# E6, top 15 no. 7: float16 gradients are refused


def reference_step(net: nn.Module, data: Tensor) -> dict[str, Tensor]:
    """Say what the parameters are after one step without a scaler, all of it in float32."""
    exact = copy.deepcopy(net).float()
    optimizer = plain(exact.parameters())
    exact(data.float()).square().mean().backward()
    optimizer.step()
    return exact.state_dict()


@pytest.mark.parametrize("unscaled_by_hand", [False, True])
@pytest.mark.parametrize("first", [torch.float16, torch.float32])
def test_e6_float16_gradients_step_as_float32_ones(amp: Amp, unscaled_by_hand: bool, first: torch.dtype) -> None:
    """E6: a model loaded in float16, or half of it; to float16's precision the step is that of float32."""
    net = layers(8, 8, 4).half()
    data = torch.randn(4, 8).half()
    expected = reference_step(net, data)
    net[0].to(first)
    scaler, optimizer = amp.scaler(2.0**8), plain(net.parameters())
    hidden = net[0](data.to(first))
    scaler.scale(net[1](hidden.half()).float().square().mean()).backward()
    if unscaled_by_hand:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    for name, value in net.state_dict().items():
        # Values up to about one, one rounding of the weight and a few of the gradient.
        torch.testing.assert_close(value.float(), expected[name], rtol=2**-9, atol=2**-9)


def test_e6_unscaled_float16_gradients_are_rounded_once(amp: Amp) -> None:
    """E6: the product with the inverse scale is made in float32 and written back, down to subnormal numbers."""
    w, slopes = weight(0.0, 0.0, 0.0, 0.0, dtype=torch.float16), torch.tensor([0.75, -(2.0**-14), 2.0**-24, 3e-7])
    scaler, optimizer = amp.scaler(1536.0), plain([w])
    backward(scaler, [w], slopes.half())
    scaled = w.grad.double().clone() if w.grad is not None else None
    assert scaled is not None
    scaler.unscale_(optimizer)
    assert w.grad is not None
    torch.testing.assert_close(w.grad, (scaled / 1536.0).half(), rtol=0, atol=2**-24)
    assert w.grad.dtype is torch.float16
    assert w.grad[0].item() == 0.75


def test_e6_sparse_float16_gradients_overflow_by_their_sums(amp: Amp) -> None:
    """E6: two finite entries of one row whose sum is no half: not a gradient to step with."""
    table = nn.Embedding(4, 2, sparse=True).half()
    before = table.weight.detach().clone()
    scaler, optimizer = amp.scaler(2.0**15), plain(table.parameters())
    scaler.scale(table(torch.tensor([1, 1, 2])).float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert table.weight.equal(before)
    assert scaler.get_scale() == 2.0**14
    optimizer.zero_grad()
    scaler.scale(table(torch.tensor([1, 1, 2])).float().sum()).backward()
    scaler.step(optimizer)
    expected = (before.float() - torch.tensor([[0.0], [2.0], [1.0], [0.0]])).half()
    assert table.weight.equal(expected)


def test_e6_complex_gradients_are_unscaled(amp: Amp) -> None:
    """E6: any dtype; PyTorch's kernel knows no complex one."""
    w = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    scaler, optimizer = amp.scaler(), plain([w])
    scaler.scale((w * (2 - 1j)).real.sum()).backward()
    scaler.step(optimizer)
    assert w.tolist() == [1 + 2j - (2 + 1j), 3 - 1j - (2 + 1j)]
