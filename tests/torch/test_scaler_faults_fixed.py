"""Rows of the list of faults, sections E and F, that PyTorch 2.13 gets right: so do both scalers here.

The rows that it gets wrong are in ``faults/``; each row of the two sections is in one place or the other.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .faults.amps import Amp
from .faults.seen_ops import dtypes_made, host_reads
from .faults.training import INF, backward, iterate, parameters_of, plain, weight


@pytest.fixture(params=["mezzo", "torch"])
def amp(request: pytest.FixtureRequest) -> Amp:
    return Amp(request.param)


def test_e2_a_scale_below_one_is_found_where_a_model_needs_it(amp: Amp) -> None:
    """E2: gradients of 98304 pass through float16 only under a scale of one half or less."""
    scaler, w = amp.scaler(), weight(0.0)
    optimizer = plain([w])
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale((w.half().float() * 98304.0).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 0.5
    assert w.item() == -98304.0 * 3


def test_e4_growth_stops_at_the_last_finite_scale(amp: Amp) -> None:
    """E4: 2**127, and still there after further steps."""
    scaler, w = amp.scaler(growth_interval=1), weight(0.0)
    iterate(scaler, plain([w]), 2.0**-30, 150)
    assert scaler.get_scale() == 2.0**127
    assert w.item() == -150 * 2.0**-30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_e5_gradients_in_other_dtypes_than_float16_and_float32(amp: Amp, dtype: torch.dtype) -> None:
    """E5: PyTorch's kernel for CUDA refuses bfloat16 ones, its kernel for the CPU takes both."""
    scaler, w = amp.scaler(), weight(0.5, 0.25, dtype=dtype)
    optimizer = plain([w])
    for slope in (0.5, INF, 0.25):
        iterate(scaler, optimizer, torch.tensor([slope, -1.0], dtype=dtype))
    assert w.dtype is dtype
    assert w.tolist() == [-0.25, 2.25]
    assert scaler.get_scale() == 2.0**15


@pytest.mark.gpu
def test_e5_bfloat16_gradients_on_cuda() -> None:
    """E5: as on the CPU."""
    scaler, w = Amp("mezzo").GradScaler("cuda"), nn.Parameter(torch.tensor([0.5, 0.25], device="cuda").bfloat16())
    optimizer = plain([w])
    for slope in (0.5, INF, 0.25):
        iterate(scaler, optimizer, torch.tensor([slope, -1.0], device="cuda", dtype=torch.bfloat16))
    assert w.tolist() == [-0.25, 2.25]


def test_e10_default_scales_are_powers_of_two_and_unscaling_is_exact(amp: Amp) -> None:
    """E10: a product with a power of two rounds nothing; other scales are the user's choice."""
    scaler, w = amp.scaler(growth_interval=2), nn.Parameter(torch.zeros(64))
    optimizer = plain([w])
    for i in range(100):
        overflows = torch.rand(()).item() < 0.4
        slope = torch.randn(64) * 2.0 ** (i % 20 - 10)
        optimizer.zero_grad()
        backward(scaler, [w], slope * INF if overflows else slope)
        assert torch.frexp(torch.tensor(scaler.get_scale())).mantissa == 0.5
        scaler.unscale_(optimizer)
        assert w.grad is not None
        assert overflows or w.grad.equal(slope)
        scaler.step(optimizer)
        scaler.update()
    assert 2.0**-24 < scaler.get_scale() < 2.0**30


@pytest.mark.parametrize(("fused", "allowed"), [(False, 1), (True, 0)])
@pytest.mark.parametrize("by_hand", [False, True])
def test_f4_host_reads_of_an_iteration(amp: Amp, fused: bool, allowed: int, by_hand: bool) -> None:
    """F4: one where the optimizer knows nothing of scaling, none where it does; finite or not."""
    scaler, optimizer = amp.scaler(), plain([weight(1.0), weight(2.0)], fused=fused)
    iterate(scaler, optimizer)
    for slope in (1.0, INF, 1.0):
        with host_reads() as reads:
            optimizer.zero_grad()
            backward(scaler, parameters_of(optimizer), slope)
            if by_hand:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert len(reads) <= allowed, reads
    assert [p.item() for p in parameters_of(optimizer)] == [-2.0, -1.0]


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_f7_clipping_after_unscale(amp: Amp, max_norm: float) -> None:
    """F7: who has unscaled by hand may clip with PyTorch's function or with mezzo's."""
    scaler, w = amp.scaler(), weight(0.0, 0.0)
    optimizer, slope = plain([w]), torch.tensor([3.0, -4.0])
    backward(scaler, [w], slope)
    scaler.unscale_(optimizer)
    norm = amp.clip(scaler, [w], max_norm)
    scaler.step(optimizer)
    assert norm.item() == pytest.approx(5.0, rel=1e-6)
    # PyTorch's clipping divides by the norm plus 1e-6.
    torch.testing.assert_close(w.detach(), -slope * min(1.0, max_norm / 5), rtol=1e-6, atol=0)


def test_f11_verdicts_of_several_optimizers_are_one_to_the_scale(amp: Amp) -> None:
    """F11, the part of one process: each optimizer steps or not by its own, the scale backs off once for all."""
    scaler, weights = amp.scaler(growth_interval=2), [weight(0.0), weight(0.0), weight(0.0)]
    optimizers = [plain([w]) for w in weights]
    scales = []
    for slopes in [(1.0, INF, 1.0), (INF, INF, 1.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)]:
        for optimizer, slope in zip(optimizers, slopes, strict=True):
            optimizer.zero_grad()
            backward(scaler, parameters_of(optimizer), slope)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert [w.item() for w in weights] == [-3.0, -2.0, -4.0]
    assert scales == [2.0**15, 2.0**14, 2.0**14, 2.0**15]


def test_f12_no_float64_on_a_device_without_it(amp: Amp) -> None:
    """F12: MPS, as far as it can be had without one: fake tensors, gradients put there by hand."""
    with FakeTensorMode(), torch.no_grad():
        w = torch.ones(3, device="mps")
        scaler, optimizer = amp.GradScaler("mps"), plain([w])
        with dtypes_made() as dtypes:
            w.grad = scaler.scale(torch.ones(3, device="mps"))
            scaler.unscale_(optimizer)
            scaler.update()
    assert torch.float32 in dtypes
    assert torch.float64 not in dtypes
