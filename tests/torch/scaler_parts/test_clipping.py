"""Clipping the norm of gradients of which some are still scaled: the right norm, and the right factor."""

from __future__ import annotations

import math

import pytest
import torch

from mezzo.errors import MezzoError
from mezzo.torch.scaling.clipping import clip_norm_, clip_value_

from .clipped import FOREACH, HostReads, equal, make, same_with_nan, torch_norm

ORDERS = [2.0, 1.0, 3.0, math.inf]
# Sums in another order, or in a wider dtype, than PyTorch's of the unscaled gradients.
CLOSE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6, torch.float64: 1e-12}

orders = pytest.mark.parametrize("order", ORDERS)
foreachs = pytest.mark.parametrize("foreach", FOREACH)
dtypes = pytest.mark.parametrize("dtype", CLOSE, ids=str)


@orders
@foreachs
@dtypes
@pytest.mark.parametrize("max_norm", [0.5, 1e9, 0.0])
def test_without_a_scaled_gradient_it_is_pytorchs_to_the_bit(dtype, foreach, order, max_norm):
    gradients = make(dtype, factor=0.5)
    norm, expected = torch_norm(gradients, max_norm, order, foreach=foreach)
    ours = clip_norm_([], gradients, None, max_norm, order, foreach=foreach)
    assert ours.dtype == norm.dtype
    assert torch.equal(ours, norm)
    assert equal(gradients, expected)


@orders
@foreachs
@dtypes
@pytest.mark.parametrize("scale", [4.0, 3.0, 0.1])
def test_scaled_gradients_are_clipped_to_the_norm_that_they_have_without_the_scale(dtype, foreach, order, scale):
    true = make(torch.float64)
    norm, expected = torch_norm(true, 0.5, order)
    scaled = [(gradient * scale).to(dtype) for gradient in true]
    ours = clip_norm_(scaled, [], torch.tensor(scale), 0.5, order, foreach=foreach)
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # The scale 0.1 is a float32 number, whatever the gradients are.
    tolerance = max(CLOSE[dtype], 0.0 if scale != 0.1 else 1e-7)
    torch.testing.assert_close(ours.double(), norm, rtol=tolerance, atol=0)
    for gradient, reference in zip(scaled, expected, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double() / scale, reference, rtol=2 * tolerance, atol=tolerance)


@orders
@foreachs
def test_scaled_and_unscaled_ones_have_one_norm_and_one_factor(foreach, order):
    true = make()
    norm, expected = torch_norm(true, 0.5, order)
    scaled, unscaled = [gradient * 64 for gradient in true[:3]], [gradient.clone() for gradient in true[3:]]
    ours = clip_norm_(scaled, unscaled, torch.tensor(64.0), 0.5, order, foreach=foreach)
    torch.testing.assert_close(ours, norm, rtol=2e-6, atol=0)
    torch.testing.assert_close([gradient / 64 for gradient in scaled] + unscaled, expected, rtol=4e-6, atol=0)


@foreachs
def test_gradients_within_the_norm_stay_as_they_are(foreach):
    scaled, unscaled = make(factor=3.0), make(torch.float16, seed=1)
    before = [gradient.clone() for gradient in (*scaled, *unscaled)]
    clip_norm_(scaled, unscaled, torch.tensor(3.0), 1e6, foreach=foreach)
    assert equal([*scaled, *unscaled], before)


@pytest.mark.parametrize("numel", [3, 10_000])
@pytest.mark.parametrize(
    ("dtype", "size", "scale"),
    [
        (torch.float16, 6e4, 2.0**16),  # the norm of the scaled ones does not fit into float16
        (torch.float32, 1e30, 2.0**100),  # their squares do not fit into float32
        (torch.bfloat16, 1e30, 2.0**100),
        (torch.float32, 1e-25, 2.0**-24),  # their squares are zero in float32
        (torch.complex64, 1e30, 2.0**100),
    ],
    ids=str,
)
def test_the_norm_is_right_where_the_scaled_numbers_leave_their_dtype(dtype, size, scale, numel):
    gradient = torch.full((numel,), size, dtype=dtype)
    true = gradient.to(torch.complex128 if dtype.is_complex else torch.float64) / scale
    norm = true.abs().square().sum().sqrt()
    limit = norm.item() / 2
    ours = clip_norm_([gradient], [], torch.tensor(scale), limit)
    # PyTorch's own float32 sum of 10,000 equal squares is off by this much.
    torch.testing.assert_close(ours.double(), norm, rtol=2e-5, atol=0)
    # The factor is 1/2 but for the 1e-6 that PyTorch adds to the norm.
    reference = true * (limit / (norm + 1e-6))
    tolerance = 1e-2 if dtype in (torch.bfloat16, torch.float16) else 2e-5
    torch.testing.assert_close(gradient.to(true.dtype) / scale, reference, rtol=tolerance, atol=0)


@foreachs
def test_unscaled_float16_gradients_are_clipped_to_a_norm_that_float16_does_not_hold(foreach):
    gradient = torch.full((400,), 6e4, dtype=torch.float16)
    assert torch_norm([gradient], 1.2e5, foreach=foreach)[1][0].abs().max() == 0  # PyTorch's would clear it
    norm = clip_norm_([], [gradient], None, 1.2e5, error_if_nonfinite=True, foreach=foreach)
    assert norm == torch.tensor(math.inf, dtype=torch.float16)
    torch.testing.assert_close(gradient, torch.full_like(gradient, 6e3), rtol=1e-3, atol=0)


def test_a_scale_that_is_a_power_of_two_gives_the_norm_that_unscaling_first_gives():
    true = make(seed=3)
    norm, _ = torch_norm(true, 1.0)
    ours = clip_norm_([gradient * 2.0**16 for gradient in true], [], torch.tensor(2.0**16), 1.0)
    torch.testing.assert_close(ours, norm, rtol=2e-7, atol=0)


@foreachs
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["scaled", "unscaled"])
def test_gradients_without_a_finite_norm_are_left_alone(where, bad, foreach):
    scaled, unscaled = make(factor=8.0), make(seed=1)
    (scaled if where == "scaled" else unscaled)[0][1, 2] = bad
    before = [gradient.clone() for gradient in (*scaled, *unscaled)]
    norm = clip_norm_(scaled, unscaled, torch.tensor(8.0), 0.01, foreach=foreach)
    assert not norm.isfinite()
    assert same_with_nan([*scaled, *unscaled], before)
    norm = clip_norm_([], unscaled, None, 0.01, foreach=foreach)
    assert bool(norm.isfinite()) == (where == "scaled")


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_norm_that_is_not_finite_is_an_error_on_demand_in_pytorchs_words(bad, order):
    gradient = torch.tensor([1.0, bad])
    with pytest.raises(RuntimeError) as theirs:
        torch_norm([gradient], 1.0, order, error_if_nonfinite=True)
    before = gradient.clone()
    for scaled, unscaled in (([gradient], []), ([], [gradient])):
        with pytest.raises(RuntimeError, match="The gradients are as they were") as ours:
            clip_norm_(scaled, unscaled, torch.tensor(2.0), 1.0, order, error_if_nonfinite=True)
        assert isinstance(ours.value, MezzoError)
        start = str(theirs.value).partition(". ")[0]
        assert start.endswith("so it cannot be clipped")
        assert str(ours.value).startswith(start)
        assert same_with_nan([gradient], [before])
    assert clip_norm_([torch.ones(4)], [], torch.tensor(2.0), 1.0, error_if_nonfinite=True) == 1.0


def test_the_host_reads_nothing_unless_it_is_to_raise():
    scaled, unscaled = make(factor=8.0), make(torch.float16, seed=1)
    with HostReads() as reads:
        clip_norm_(scaled, unscaled, torch.tensor(8.0), 0.1)
        clip_norm_([], unscaled, None, 0.1)
        clip_value_(scaled, unscaled, torch.tensor(8.0), 0.1)
    assert reads.count == 0
    with HostReads() as reads:
        clip_norm_(scaled, unscaled, torch.tensor(8.0), 0.1, error_if_nonfinite=True)
    assert reads.count == 1


def test_gradients_of_several_dtypes_have_one_norm():
    true = [torch.tensor([3.0, 0.0]), torch.tensor([4.0], dtype=torch.float64), torch.tensor([12.0 + 0j])]
    scaled = [gradient * 2 for gradient in true]
    assert clip_norm_(scaled, [], torch.tensor(2.0), 1.3).item() == pytest.approx(13.0, rel=1e-12)
    for gradient, before in zip(scaled, true, strict=True):
        assert gradient.dtype == before.dtype
        torch.testing.assert_close(gradient / 2, before / 10, rtol=1e-6, atol=0)


def test_no_gradients_have_the_norm_zero():
    assert torch.equal(clip_norm_([], [], torch.tensor(2.0), 1.0), torch_norm([], 1.0)[0])
    assert clip_norm_([torch.ones(0)], [], torch.tensor(2.0), 1.0) == 0
    assert clip_norm_([torch.ones(0)], [torch.ones(0)], torch.tensor(2.0), 1.0, math.inf) == 0
    assert clip_norm_([torch.ones(0)], [torch.ones(1)], torch.tensor(2.0), 9.0, math.inf) == 1


def test_gradients_that_do_not_lie_in_order_or_need_gradients_themselves():
    true = torch.randn(100, 120, generator=torch.Generator().manual_seed(0))
    gradient = (true * 4).t().requires_grad_() * 1
    norm = clip_norm_([gradient], [], torch.tensor(4.0), 1.0)
    assert not norm.requires_grad
    torch.testing.assert_close(norm, true.norm(), rtol=2e-6, atol=0)
    torch.testing.assert_close(gradient.detach() / 4, true.t() / true.norm(), rtol=4e-6, atol=0)


@pytest.mark.gpu
@orders
def test_on_a_gpu_and_across_devices(order):
    true = make(torch.float64)
    norm, expected = torch_norm(true, 0.5, order)
    scaled = [(gradient * 64).float().to(device) for gradient, device in zip(true, ["cuda", "cpu"] * 3, strict=False)]
    ours = clip_norm_(scaled, [], torch.tensor(64.0, device="cuda"), 0.5, order)
    assert ours.device.type == "cuda"
    torch.testing.assert_close(ours.cpu().double(), norm, rtol=2e-6, atol=0)
    torch.testing.assert_close([each.cpu().double() / 64 for each in scaled], expected, rtol=4e-6, atol=1e-7)
    clip_value_(scaled, [], torch.tensor(64.0, device="cuda"), 0.001)
    assert max(each.abs().max().item() for each in scaled) == pytest.approx(0.064)
