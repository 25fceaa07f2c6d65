"""Gradient scaling on the stand-in, by the Python kernels: scale, tracker and weights are the CPU's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from standin_backend import calls
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo.torch
from mezzo.errors import DeviceError
from mezzo.torch.scaling_kernels import UNSCALE, UPDATE, register_scaling_kernels

D = "standin"
STEPS = 200
BAD = {0, 1, 2, 17, 40, 41, 99, 100, 150, 199}
BAD_SECOND = {5, 40, 120}
SCALERS: dict[str, Callable[..., torch.amp.GradScaler]] = {
    "mezzo": mezzo.torch.GradScaler,
    "torch": torch.amp.GradScaler,
}
each_scaler = pytest.mark.parametrize("scaler_class", SCALERS.values(), ids=SCALERS)


class Outcome(NamedTuple):
    """What a training has left: at each step, and at the end."""

    scales: list[str]
    trackers: list[int]
    weights: list[list[float]]
    reads: list[int]


class HostReads(TorchDispatchMode):
    """Count how often the host asks the CPU for a number."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_reads(device: str) -> Iterator[Callable[[], int]]:
    if device == D:
        with calls() as ran:
            yield lambda: sum(call.host_read for call in ran)
    else:
        with HostReads() as mode:
            yield lambda: mode.count


def loss_of(model: nn.Module, x: Tensor, *, bad: bool) -> Tensor:
    loss = model(x).square().mean()
    return loss * float("inf") if bad else loss


def train(device: str, scaler_class: Callable[..., torch.amp.GradScaler], *, use: str, **rule: Any) -> Outcome:
    torch.manual_seed(0)
    model, second = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Linear(4, 1)
    batches = torch.randn(STEPS, 2, 5, 4)
    for each in (model, second):
        each.to(device)
    # Not Adam, which reads its step count, a CPU tensor.
    first = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    optimizers = [first, torch.optim.SGD(second.parameters(), 0.01, weight_decay=0.1)]
    if use != "two optimizers":
        del optimizers[1:]
    scaler = scaler_class(device, growth_interval=3, **rule)
    done = Outcome([], [], [], [])
    for step in range(STEPS):
        xs = batches[step].to(device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(2 if use == "accumulation" else 1):
            scaler.scale(loss_of(model, xs[micro], bad=step in BAD)).backward()
        if use == "two optimizers":
            scaler.scale(loss_of(second, xs[0], bad=step in BAD_SECOND)).backward()
        with counted_reads(device) as reads:
            if use == "clipping":
                scaler.unscale_(optimizers[0])
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        done.reads.append(reads())
        done.scales.append(scaler._scale.item().hex())
        done.trackers.append(scaler._growth_tracker.item())
    done.weights.extend(parameter.tolist() for parameter in (*model.parameters(), *second.parameters()))
    return done


RULES = {
    "powers of two": {"init_scale": 2.0**16},
    "others": {"init_scale": 1234.5, "growth_factor": 1.1, "backoff_factor": 0.9},
    "at the largest float32": {"init_scale": 2.0**100, "growth_factor": 2.0**20},
}


@each_scaler
@pytest.mark.parametrize(
    ("use", "rule"),
    [
        ("plain", "at the largest float32"),
        ("accumulation", "powers of two"),
        ("clipping", "others"),
        ("two optimizers", "others"),
    ],
)
def test_a_training_goes_as_on_the_cpu_bit_for_bit(scaler_class, use, rule):
    there, here = (train(device, scaler_class, use=use, **RULES[rule]) for device in (D, "cpu"))
    assert there == here
    assert len(set(here.scales)) > 5
    assert set(here.trackers) == {0, 1, 2}
    assert set(there.reads) == {2 if use == "two optimizers" else 1}


def test_mezzos_scaler_on_the_device_moves_as_pytorchs_on_the_cpu():
    found = train(D, mezzo.torch.GradScaler, use="clipping", **RULES["powers of two"])
    assert found == train("cpu", torch.amp.GradScaler, use="clipping", **RULES["powers of two"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_kernels_give_on_the_device_what_pytorchs_give_on_the_cpu(dtype):
    numbers = torch.tensor([1.0, -3.0, 0.3, 6e4, 0.0], dtype=dtype)
    for bad in (2.0, float("inf"), float("nan")):
        lists = []
        for device in (D, "cpu"):
            scaled = [
                numbers.to(device),
                torch.full((2, 3), bad, dtype=dtype, device=device).t(),
                numbers[:0].to(device),
            ]
            found, factor = torch.zeros((), device=device), torch.full((), 0.37, device=device)
            with calls() as ran:
                torch._amp_foreach_non_finite_check_and_unscale_(scaled, found, factor)
            assert not any(call.host_read for call in ran)
            lists.append([each.cpu() for each in (*scaled, found)])
        for one, other in zip(*lists, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_read_on_the_host_in_an_update():
    scale, found = (torch.full((), number, device=D) for number in (8.0, 1.0))
    tracker = torch.ones((), dtype=torch.int32, device=D)
    with calls() as ran:
        assert torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 2) is scale
    assert len(ran) > 5
    assert not any(call.host_read for call in ran)
    assert (scale.item(), tracker.item()) == (4.0, 0)


def test_a_number_on_the_cpu_is_refused_before_anything_is_written():
    scaled, found, factor = torch.ones(2, device=D), torch.zeros((), device=D), torch.tensor(0.5)
    text = r"^inv_scale must be a STANDIN tensor\. It is on cpu, others are on standin:0; move it there with inv_scale\.to\("
    with pytest.raises(DeviceError, match=text):
        torch._amp_foreach_non_finite_check_and_unscale_([scaled], found, factor)
    text = (
        r"^one of scaled_grads was not a STANDIN tensor\. It is on cpu, others are on standin:0; call the op once for "
    )
    with pytest.raises(DeviceError, match=text):
        torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(2), scaled], found, factor.to(D))
    text = r"^growth_tracker must be a STANDIN tensor\. It is on cpu"
    with pytest.raises(DeviceError, match=text):
        torch._amp_update_scale_(factor.to(D), torch.tensor(0, dtype=torch.int32), found, 2.0, 0.5, 2)
    assert (scaled.tolist(), found.item()) == ([1.0, 1.0], 0.0)


def test_an_expanded_gradient_is_refused_before_anything_is_written():
    first, found, factor = torch.ones(2, device=D), torch.zeros((), device=D), torch.full((), 0.5, device=D)
    with pytest.raises(
        RuntimeError, match="more than one element of the written-to tensor refers to a single memory loc"
    ):
        torch._amp_foreach_non_finite_check_and_unscale_([first, torch.ones(1, device=D).expand(3)], found, factor)
    assert first.tolist() == [1.0, 1.0]


def test_on_fake_tensors_of_the_device_nothing_depends_on_values():
    # Called as functions: for fake tensors the dispatcher asks PyTorch's meta kernels, not these.
    with FakeTensorMode():
        scaled = [torch.empty(3, dtype=dtype, device=D) for dtype in (torch.float16, torch.float32, torch.float64)]
        found, factor, scale = (torch.empty((), device=D) for _ in range(3))
        tracker = torch.empty((), dtype=torch.int32, device=D)
        mezzo.torch.scaling_kernels.non_finite_check_and_unscale_(scaled, found, factor)
        assert mezzo.torch.scaling_kernels.update_scale_(scale, tracker, found, 1.1, 0.9, 2) is scale
        assert {each.device.type for each in (*scaled, found, scale, tracker)} == {D}
        with pytest.raises(DataDependentOutputException):
            found.item()


def test_register_accelerator_has_registered_both_kernels():
    for name in (UNSCALE, UPDATE):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "PrivateUse1")
    assert register_scaling_kernels() == ()
