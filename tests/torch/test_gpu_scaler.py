"""On a real GPU: gradient scaling against PyTorch's own scaler, by value, and without waiting for the device."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import GradScaler, NonFinite, autocast

from .scaler_contract.optimizers import Momentum

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
INF, NAN = float("inf"), float("nan")
Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    f"{kind.__name__} {way}": lambda parameters, kind=kind, options=options: kind(parameters, lr=0.01, **options)
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    for way, options in {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items()
}
CONTRACT: dict[str, Make] = {
    **{name: make for name, make in OPTIMIZERS.items() if name.endswith("fused")},
    "custom": lambda parameters: Momentum(parameters, scaled=True),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
contract = pytest.mark.parametrize("make", CONTRACT.values(), ids=CONTRACT)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(DEVICE)


def train(
    make: Make, scaler: torch.amp.GradScaler, *, clip: bool, steps: int = 60
) -> tuple[list[Tensor], list[tuple[float, int]]]:
    """Float16 training in which some gradients are made Inf or NaN; the parameters, and scale and tracker of each step."""
    dice, inputs = random.Random(0), torch.Generator(DEVICE).manual_seed(0)
    model = net()
    optimizer = make(model.parameters())
    states = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(DEVICE):
            loss = model(torch.randn(8, 16, device=DEVICE, generator=inputs)).float().square().mean()
        scaler.scale(loss).backward()
        if dice.random() < 0.2:
            model[2].weight.grad[0, 3] = dice.choice([INF, NAN])
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        states.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return [parameter.detach() for parameter in model.parameters()], states


@pytest.mark.parametrize("clip", [False, True], ids=["implicit", "unscale_ and clip"])
@optimizers
def test_parameters_scale_and_tracker_are_those_under_pytorchs_scaler(make: Make, clip: bool) -> None:
    numbers = {"init_scale": 2.0**10, "growth_interval": 6}
    ours, states = train(make, GradScaler(DEVICE, **numbers), clip=clip)
    theirs, their_states = train(make, torch.amp.GradScaler(DEVICE, **numbers), clip=clip)
    assert states == their_states
    assert len({scale for scale, _ in states}) > 2
    # The same kernels on the same numbers; a sum on a GPU may be taken in another order.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Let PyTorch raise where the host waits for the GPU."""
    with _debug_mode("error"):
        yield


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Count how often the host waits for the GPU, as PyTorch warns of it."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _debug_mode("warn"):
            yield found
    found += [str(one.message) for one in caught if "synchronizing" in str(one.message)]


@contextmanager
def _debug_mode(mode: str) -> Iterator[None]:
    with warnings.catch_warnings():
        # It says once that it does not see everything.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(8, 16, device=DEVICE)).square().mean()


def test_a_wait_is_seen() -> None:
    number = torch.ones((), device=DEVICE)
    with counted_waits() as waits:
        number.item()
    assert len(waits) == 1
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        number.item()


@pytest.mark.parametrize("explicit", [False, True])
@contract
def test_a_contract_optimizer_never_waits(make: Make, explicit: bool) -> None:
    """Twelve iterations: what is looked at some iterations later is looked at here too."""
    model = net()
    optimizer, scaler = make(model.parameters()), GradScaler(DEVICE, growth_interval=3)
    bad = torch.full((32,), INF, device=DEVICE)
    for index in range(12):
        optimizer.zero_grad()
        loss = loss_of(model)
        with no_waiting():
            scaled = scaler.scale(loss)
        scaled.backward()
        if index % 4 == 1:
            model[0].bias.grad.copy_(bad)
        with no_waiting():
            if explicit:
                scaler.unscale_(optimizer)
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.steps_taken(optimizer) == 9


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "overflow"])
def test_an_unmodified_optimizer_waits_once_a_step(bad: bool, explicit: bool) -> None:
    model = net()
    optimizer, scaler = OPTIMIZERS["SGD foreach"](model.parameters()), GradScaler(DEVICE)
    for _ in range(8):
        optimizer.zero_grad()
        loss = loss_of(model)
        with no_waiting():
            scaled = scaler.scale(loss)
        scaled.backward()
        if bad:
            model[0].bias.grad.fill_(INF)
        if explicit:
            with no_waiting():
                scaler.unscale_(optimizer)
                scaler.clip_grad_value_(optimizer, 1.0)
        with counted_waits() as waits:
            scaler.step(optimizer)
        assert len(waits) == 1
        with no_waiting():
            scaler.update()
    assert scaler.steps_taken(optimizer) == (0 if bad else 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("bad", [None, INF, NAN])
def test_gradients_of_any_dtype_are_unscaled_and_checked(dtype: torch.dtype, bad: float | None) -> None:
    weights = [nn.Parameter(torch.ones(5, dtype=one, device=DEVICE)) for one in (dtype, torch.float32)]
    optimizer, scaler = torch.optim.SGD(weights, lr=0.5), GradScaler(DEVICE, init_scale=8.0)
    scaler.scale(torch.ones((), device=DEVICE))
    for weight in weights:
        weight.grad = torch.full_like(weight, 16.0)
    if bad is not None:
        weights[0].grad[3] = bad
    scaler.unscale_(optimizer)
    if bad is None:
        for weight in weights:
            torch.testing.assert_close(weight.grad, torch.full_like(weight, 2.0), rtol=0, atol=0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.stepped(optimizer) is (bad is None)
    expected = 0.0 if bad is None else 1.0
    for weight in weights:
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, expected), rtol=0, atol=0)
    assert scaler.get_scale() == (8.0 if bad is None else 4.0)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_float16_parameters_with_fused_optimizers(kind: Any, explicit: bool) -> None:
    weight, other = (nn.Parameter(torch.ones(5, dtype=torch.float16, device=DEVICE)) for _ in range(2))
    optimizer, reference = (kind([one], lr=0.125, fused=True) for one in (weight, other))
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler.scale(torch.ones((), device=DEVICE))
    for factor, bad in ((1.0, False), (-3.0, True), (0.5, False)):
        weight.grad = torch.full_like(weight, INF if bad else factor * scaler.get_scale())
        if not bad:
            other.grad = torch.full_like(other, factor)
            reference.step()
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(weight, other, rtol=0, atol=0)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("fused", [False, True])
def test_overflowing_parameters_are_named(fused: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, fused=fused)
    scaler = GradScaler(DEVICE)
    scaler.scale(loss_of(model)).backward()
    model[0].weight.grad[0, :3] = torch.tensor([NAN, INF, -INF], device=DEVICE)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.nonfinite(optimizer) == (NonFinite("0.weight", 1, 2, 512, "float32"),)
    assert not scaler.stepped(optimizer)
    assert scaler.found_inf(optimizer).device.type == DEVICE


def test_a_float16_run_that_calibrates_its_scale_learns() -> None:
    """From a scale far too large, down and on: float16 gradients overflow for real here."""
    model, scaler = net(), GradScaler(DEVICE, init_scale=2.0**24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    target = torch.linspace(-1.0, 1.0, 8, device=DEVICE)[:, None]
    inputs = torch.randn(8, 16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        with autocast(DEVICE, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(inputs), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert 0 < scaler.steps_taken(optimizer) < 100
    assert scaler.get_scale() < 2.0**24
    assert losses[-1] < losses[0] / 10


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
class TestOnTwoDevices:
    @pytest.mark.parametrize("explicit", [False, True])
    @pytest.mark.parametrize("name", ["SGD foreach", "Adam fused", "custom"])
    def test_an_inf_on_one_device_skips_both(self, name: str, explicit: bool) -> None:
        make = {**OPTIMIZERS, **CONTRACT}[name]
        weights = [nn.Parameter(torch.ones(5, device=f"cuda:{index}")) for index in range(2)]
        optimizer, scaler = make(weights), GradScaler(DEVICE, init_scale=8.0)
        for where in (1, 0, None):
            before = [weight.detach().clone() for weight in weights]
            scaler.scale(torch.ones((), device="cuda:0"))
            for index, weight in enumerate(weights):
                weight.grad = torch.full_like(weight, INF if index == where else 8.0)
            if explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.stepped(optimizer) is (where is None)
            moved = [not torch.equal(weight, old) for weight, old in zip(weights, before, strict=True)]
            assert moved == [where is None] * 2
        assert scaler.get_scale() == 2.0
