"""How often the host waits for a device: never in `scale`, `unscale_` and `update`, once per device in `step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from mezzo.torch import GradScaler

from .optimizers import Momentum, backward, parameter
from .reading import counted_reads

Make = Callable[..., torch.optim.Optimizer]

# None of these reads a device by itself; Adam without `fused` reads its step counters, which lie on the CPU.
UNMODIFIED: dict[str, Make] = {
    "for-loop": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "custom": Momentum,
}
CONTRACT: dict[str, Make] = {
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "custom": lambda parameters: Momentum(parameters, scaled=True),
}
unmodified = pytest.mark.parametrize("make", UNMODIFIED.values(), ids=UNMODIFIED)
contract = pytest.mark.parametrize("make", CONTRACT.values(), ids=CONTRACT)
verdicts = pytest.mark.parametrize("factor", [1.0, float("inf"), float("nan")])


def iterate(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    weights: list[nn.Parameter],
    factor: float,
    *,
    explicit: bool = True,
    clip: Callable[..., Any] | None = None,
) -> dict[str, int]:
    """One iteration; the reads of each method."""
    reads: dict[str, int] = {}

    def count(name: str, call: Callable[..., Any], *args: Any) -> Any:
        with counted_reads() as found:
            result = call(*args)
        reads[name] = len(found)
        return result

    optimizer.zero_grad()
    loss = sum(weight.sum() for weight in weights) * factor
    count("scale", scaler.scale, loss).backward()
    if explicit:
        count("unscale_", scaler.unscale_, optimizer)
    if clip is not None:
        count("clip", clip, optimizer, 1.0)
    count("step", scaler.step, optimizer)
    count("update", scaler.update)
    return reads


def test_the_count_sees_reads() -> None:
    number, numbers = torch.tensor(1.0), torch.tensor([1.0, 2.0])
    readers: list[Callable[[], Any]] = [
        number.item,
        lambda: bool(number),
        lambda: float(number),
        lambda: numbers[number.long()],
        lambda: numbers[numbers > 1.0],
        lambda: torch.equal(number, number),
        lambda: torch.allclose(number, number),
        numbers.nonzero,
    ]
    for reader in readers:
        with counted_reads() as reads:
            reader()
        assert len(reads) == 1, reads


@pytest.mark.parametrize("explicit", [False, True])
@verdicts
@unmodified
def test_an_unmodified_optimizer_costs_one_read_a_step(make: Make, factor: float, explicit: bool) -> None:
    weights = [parameter(), parameter(1.0, 2.0, 3.0)]
    optimizer, scaler = make(weights), GradScaler("cpu")
    for once in (factor, 1.0, factor):
        reads = iterate(scaler, optimizer, weights, once, explicit=explicit)
        assert reads.pop("step") <= 1
        assert set(reads.values()) == {0}


@pytest.mark.parametrize("explicit", [False, True])
@verdicts
@contract
def test_a_contract_optimizer_costs_none(make: Make, factor: float, explicit: bool) -> None:
    weights = [parameter(), parameter(1.0, 2.0, 3.0)]
    optimizer, scaler = make(weights), GradScaler("cpu")
    for once in (1.0, factor, 1.0):
        assert set(iterate(scaler, optimizer, weights, once, explicit=explicit).values()) == {0}


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.bfloat16, torch.complex64)], ids=str)
def test_several_dtypes_on_one_device_cost_one_read(dtypes: tuple[torch.dtype, ...]) -> None:
    weights = [parameter(dtype=dtype) for dtype in dtypes]
    optimizer, scaler = torch.optim.SGD(weights, lr=0.1, foreach=True), GradScaler("cpu")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    scaler.scale(torch.ones(()))
    with counted_reads() as reads:
        scaler.unscale_(optimizer)
    assert reads == []
    with counted_reads() as reads:
        scaler.step(optimizer)
    assert len(reads) <= 1
    with counted_reads() as reads:
        scaler.update()
    assert reads == []


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("explicit", [False, True])
@verdicts
@pytest.mark.parametrize("make", [UNMODIFIED["foreach"], CONTRACT["Adam"]], ids=["unmodified", "contract"])
def test_clipping_waits_for_nothing(make: Make, factor: float, explicit: bool, norm_type: float) -> None:
    weights = [parameter(), parameter(1.0, 2.0, 3.0)]
    optimizer, scaler = make(weights), GradScaler("cpu")

    def clip(optimizer: torch.optim.Optimizer, bound: float) -> None:
        scaler.clip_grad_norm_(optimizer, bound, norm_type=norm_type)
        scaler.clip_grad_value_(optimizer, bound)

    reads = iterate(scaler, optimizer, weights, factor, explicit=explicit, clip=clip)
    assert reads["clip"] == 0
    assert reads["step"] <= (1 if make is UNMODIFIED["foreach"] else 0)


@verdicts
def test_merging_waits_for_nothing(factor: float) -> None:
    weight = parameter()
    optimizer = Momentum([weight])
    scalers = [GradScaler("cpu", init_scale=scale) for scale in (8.0, 64.0)]
    with counted_reads() as reads:
        for scaler in scalers:
            with scaler.merge(optimizer):
                backward(scaler, weight, factor)
    assert reads == []


def test_growing_and_backing_off_wait_for_nothing() -> None:
    weights = [parameter()]
    optimizer = UNMODIFIED["foreach"](weights)
    scaler = GradScaler("cpu", init_scale=2.0**5, growth_interval=2, min_scale=4.0, max_scale=2.0**6)
    scales = []
    for factor in [1.0] * 6 + [float("inf")] * 6 + [float("nan")] * 3:
        reads = iterate(scaler, optimizer, weights, factor)
        assert reads["update"] == 0
        scales.append(scaler.get_scale())
    assert scales == [32, 64, 64, 64, 64, 64, 32, 16, 8, 4, 4, 4, 4, 4, 4]


def test_asking_whether_it_stepped_is_free_where_step_has_read_it() -> None:
    weights = [parameter()]
    optimizer, scaler = UNMODIFIED["foreach"](weights), GradScaler("cpu")
    iterate(scaler, optimizer, weights, 1.0)
    with counted_reads() as reads:
        assert scaler.stepped(optimizer)
        assert scaler.found_inf(optimizer).dtype is torch.float32
        assert scaler.skipped_in_a_row(optimizer) == 0
        assert scaler.steps_taken(optimizer) == 1
        assert scaler.nonfinite(optimizer) == ()
    assert reads == []


def test_the_verdict_on_the_device_of_a_contract_optimizer_is_not_read() -> None:
    weights = [parameter()]
    optimizer, scaler = CONTRACT["SGD"](weights), GradScaler("cpu")
    iterate(scaler, optimizer, weights, 1.0)
    with counted_reads() as reads:
        verdict = scaler.found_inf(optimizer)
    assert reads == []
    assert verdict.item() == 0.0


# The same on tensors that PyTorch takes for CUDA's and that hold no values: any read raises, however it is spelled.


@pytest.fixture
def _fake_tensors() -> Iterator[None]:
    with FakeTensorMode(), torch.no_grad():
        yield


on_fake_cuda = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU shows the real thing: test_gpu_scaler.py"),
    pytest.mark.usefixtures("_fake_tensors"),
]


def fakes(*devices: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Weights with gradients, one a device; without autograd, whose nodes a build without CUDA cannot make."""
    weights = [torch.empty(3, device=device, dtype=dtype) for device in devices]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    return weights


class TestOnFakeCuda:
    pytestmark = on_fake_cuda

    def test_a_read_raises_here(self) -> None:
        (weight,) = fakes("cuda:0")
        number = weight.select(0, 0)
        for read in (number.item, number.tolist, lambda: bool(number)):
            with pytest.raises(DataDependentOutputException):
                read()
            with counted_reads(answer=True) as reads:
                read()
            assert len(reads) == 1
        for copy in (weight.cpu, lambda: weight.to("cpu"), lambda: torch.ones(()).to("cuda:0")):
            with counted_reads() as reads:
                copy()
            assert reads != []
        with counted_reads() as reads:
            weight.to("cpu", non_blocking=True)
            torch.ones(()).to("cuda:0", non_blocking=True)
            weight.to("cuda:1")
        assert reads == []

    @pytest.mark.parametrize("explicit", [False, True])
    @pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cuda:1")], ids=["one device", "two"])
    @pytest.mark.parametrize(
        "make", [CONTRACT["Adam"], CONTRACT["AdamW"], CONTRACT["custom"]], ids=["Adam", "AdamW", "custom"]
    )
    def test_the_whole_iteration_of_a_contract_optimizer(
        self, make: Make, devices: tuple[str, ...], explicit: bool
    ) -> None:
        weights = fakes(*devices)
        optimizer, scaler = make(weights), GradScaler("cpu")
        with counted_reads() as reads:
            for _ in range(3):
                scaler.scale(torch.empty((), device="cuda:0"))
                if explicit:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        assert reads == []

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
    def test_unscale_and_update_of_gradients_of_any_dtype(self, dtype: torch.dtype) -> None:
        optimizer, scaler = UNMODIFIED["foreach"](fakes("cuda:0", "cuda:1", dtype=dtype)), GradScaler("cpu")
        with counted_reads() as reads:
            scaler.scale(torch.empty((), device="cuda:0"))
            scaler.unscale_(optimizer)
            scaler.update()
        assert reads == []

    @pytest.mark.parametrize("explicit", [False, True])
    @pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cuda:1")], ids=["one device", "two"])
    @unmodified
    def test_an_unmodified_optimizer_costs_one_read_a_device(
        self, make: Make, devices: tuple[str, ...], explicit: bool
    ) -> None:
        optimizer, scaler = make(fakes(*devices)), GradScaler("cpu")
        for _ in range(3):
            scaler.scale(torch.empty((), device="cuda:0"))
            if explicit:
                with counted_reads() as reads:
                    scaler.unscale_(optimizer)
                assert reads == []
            with counted_reads(answer=True) as reads:
                scaler.step(optimizer)
            assert 1 <= len(reads) <= len(devices)
            scaler.update()

    def test_asking_a_contract_optimizer_reads_and_then_no_more(self) -> None:
        optimizer, scaler = CONTRACT["Adam"](fakes("cuda:0")), GradScaler("cpu")
        scaler.scale(torch.empty((), device="cuda:0"))
        scaler.step(optimizer)
        scaler.update()
        for first in (True, False):
            with counted_reads(answer=True) as reads:
                scaler.stepped(optimizer)
                scaler.steps_taken(optimizer)
                scaler.skipped_in_a_row(optimizer)
            assert bool(reads) is first

    def test_clipping(self) -> None:
        weights = fakes("cuda:0", "cuda:0")
        optimizer, scaler = UNMODIFIED["foreach"](weights), GradScaler("cpu")
        with counted_reads() as reads:
            scaler.scale(torch.empty((), device="cuda:0"))
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.clip_grad_value_(optimizer, 1.0)
            scaler.unscale_(optimizer)
            scaler.clip_grad_norm_(weights, 1.0)
            scaler.clip_grad_value_(weights, 1.0)
        assert reads == []
