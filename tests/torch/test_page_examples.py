"""The examples of PyTorch's AMP page that run on a CPU, with mezzo's region in the place of ``torch.autocast``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mezzo.torch
from mezzo.torch import active_policy, autocast

Region = Callable[..., Any]
LOW = (torch.bfloat16, torch.float16)
low_dtypes = pytest.mark.parametrize("dtype", LOW, ids=str)
same_policies = pytest.mark.parametrize("policy", [None, "torch"])
# TorchScript is deprecated as a whole, and the page still shows it.
torchscript = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")


class Net(nn.Module):
    """A small convolution net for the 8x8 digits, with ops of every kind of rule."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)


def batches(count: int, size: int = 32) -> list[tuple[Tensor, Tensor]]:
    images, labels = digits()
    return [(images[i * size : (i + 1) * size], labels[i * size : (i + 1) * size]) for i in range(count)]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def train(region: Region, steps: int = 6) -> tuple[list[float], list[Tensor]]:
    """The page's "CPU Training Example"."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for images, labels in batches(steps):
        optimizer.zero_grad()
        with region():
            output = model(images)
            loss = nn.functional.cross_entropy(output, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [*model.parameters(), *model.buffers()]


def torch_region(dtype: torch.dtype, **kwargs: Any) -> Region:
    return functools.partial(torch.autocast, "cpu", dtype=dtype, **kwargs)


def mezzo_region(dtype: torch.dtype, **kwargs: Any) -> Region:
    return functools.partial(autocast, "cpu", dtype=dtype, **kwargs)


def assert_all_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@low_dtypes
@same_policies
def test_training_loop_gives_pytorchs_losses_and_weights(dtype: torch.dtype, policy: str | None) -> None:
    losses, state = train(mezzo_region(dtype, policy=policy))
    expected_losses, expected_state = train(torch_region(dtype))
    assert losses == expected_losses
    assert_all_equal(state, expected_state)
    assert losses[-1] < losses[0] / 2


@low_dtypes
def test_training_loop_under_unified_follows_the_float32_losses(dtype: torch.dtype) -> None:
    losses, _ = train(mezzo_region(dtype, policy="unified"))
    reference, _ = train(torch_region(dtype, enabled=False))
    # Steps with a large rate amplify rounding; bfloat16 keeps 8 bits of the mantissa, float16 11.
    tolerance = 0.05 if dtype is torch.bfloat16 else 0.01
    assert losses == pytest.approx(reference, rel=tolerance, abs=tolerance)
    assert losses != reference


@low_dtypes
def test_training_loop_under_fp32_is_float32_training(dtype: torch.dtype) -> None:
    losses, state = train(mezzo_region(dtype, policy="fp32"))
    reference, expected = train(torch_region(dtype, enabled=False))
    assert losses == reference
    assert_all_equal(state, expected)


@low_dtypes
@same_policies
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_loop(dtype: torch.dtype, policy: str | None, mode: Callable[[], Any]) -> None:
    model = net().eval()
    for images, _ in batches(3):
        with mode():
            with autocast("cpu", dtype=dtype, policy=policy):
                output = model(images)
            with torch.autocast("cpu", dtype=dtype):
                expected = model(images)
        assert output.dtype is dtype
        assert torch.equal(output, expected)


@low_dtypes
@same_policies
def test_decorator_on_forward(dtype: torch.dtype, policy: str | None) -> None:
    class Decorated(Net):
        @autocast("cpu", dtype=dtype, policy=policy)
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images)

    class Expected(Net):
        @torch.autocast("cpu", dtype=dtype)
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images)

    images, _ = batches(1)[0]
    gradients = []
    for kind in (Decorated, Expected):
        torch.manual_seed(0)
        model = kind()
        output = model(images)
        assert output.dtype is dtype
        output.float().square().sum().backward()
        gradients.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
    assert_all_equal(gradients[0], gradients[1])
    assert Decorated.forward.__wrapped__.__name__ == "forward"


@low_dtypes
@pytest.mark.parametrize("policy", [None, "torch", "unified"])
def test_nested_disabled_region(dtype: torch.dtype, policy: str | None) -> None:
    a, b, c = torch.rand(3, 8, 8)
    with autocast("cpu", dtype=dtype, policy=policy):
        low = torch.mm(a, b)
        assert low.dtype is dtype
        with autocast("cpu", enabled=False):
            # Without the cast the two dtypes meet: that is why the page writes .float() here.
            with pytest.raises(RuntimeError, match="same dtype"):
                torch.mm(c, low)
            full = torch.mm(c, low.float())
            assert full.dtype is torch.float32
        again = torch.mm(full, c)
        assert again.dtype is dtype
    assert torch.equal(low, torch.mm(a.to(dtype), b.to(dtype)))
    assert torch.equal(full, torch.mm(c, low.float()))
    assert torch.equal(again, torch.mm(full.to(dtype), c.to(dtype)))


@low_dtypes
def test_mixed_inputs_and_float_outside(dtype: torch.dtype) -> None:
    a, b, c, d = torch.rand(4, 8, 8)
    with autocast("cpu", dtype=dtype):
        e = torch.mm(a, b)
        f = torch.mm(d, e)
    assert (e.dtype, f.dtype) == (dtype, dtype)
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(c, f)
    g = torch.mm(c, f.float())
    assert torch.equal(g, c @ (d.to(dtype) @ (a.to(dtype) @ b.to(dtype))).float())


@torchscript
@low_dtypes
@pytest.mark.parametrize("policy", [None, "torch", "unified"])
def test_jit_trace_with_the_cache_off(dtype: torch.dtype, policy: str | None) -> None:
    images, _ = batches(1)[0]
    model = nn.Sequential(net().eval(), nn.Softmax(-1))
    with torch.no_grad(), autocast("cpu", dtype=dtype, cache_enabled=False, policy=policy):
        traced = torch.jit.freeze(torch.jit.trace(model.eval(), images))
        outputs = [traced(images) for _ in range(3)]
        eager = model(images)
    assert eager.dtype is (torch.float32 if policy == "unified" else dtype)
    assert_all_equal(outputs, [eager] * 3)
    if policy != "unified":
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            assert torch.equal(eager, model(images))


@torchscript
@pytest.mark.filterwarnings("ignore:Output nr 1. of the traced function:torch.jit.TracerWarning")
@pytest.mark.xfail(
    reason="TorchScript's own autocast pass casts by PyTorch's list before the kernels of the policy see the inputs"
)
def test_jit_trace_under_a_policy_that_lifts_linear_to_float32() -> None:
    images, _ = batches(1)[0]
    model = net().eval()
    with torch.no_grad(), autocast("cpu", cache_enabled=False, policy="fp32"):
        traced = torch.jit.freeze(torch.jit.trace(model, images))
        outputs = [traced(images) for _ in range(3)]
        eager = model(images)
    assert_all_equal(outputs, [eager] * 3)


def test_a_thread_starts_outside_of_any_region() -> None:
    def state() -> tuple[bool, torch.dtype, str]:
        enabled, product = torch.is_autocast_enabled("cpu"), torch.rand(4, 4) @ torch.rand(4, 4)
        return enabled, product.dtype, active_policy("cpu").name

    with ThreadPoolExecutor(1) as pool, autocast("cpu", policy="unified"):
        assert pool.submit(state).result() == (False, torch.float32, "torch")
        assert state() == (True, torch.bfloat16, "unified")


def test_threads_with_regions_of_their_own_do_not_meet() -> None:
    settings = [
        (torch.bfloat16, "torch"),
        (torch.float16, "unified"),
        (torch.float16, "fp32"),
        (torch.bfloat16, None),
    ]
    barrier = Barrier(len(settings), timeout=60)

    def work(dtype: torch.dtype, policy: str | None) -> tuple[torch.dtype, torch.dtype]:
        x = torch.rand(4, 4)
        with autocast("cpu", dtype=dtype, policy=policy):
            barrier.wait()
            product = x @ x
            barrier.wait()
            return product.dtype, product.softmax(-1).dtype

    with ThreadPoolExecutor(len(settings)) as pool:
        found = list(pool.map(work, *zip(*settings, strict=True)))
    f32 = torch.float32
    assert found == [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, f32),
        (f32, f32),
        (torch.bfloat16, torch.bfloat16),
    ]


@low_dtypes
def test_model_with_a_region_in_forward_serves_several_threads(dtype: torch.dtype) -> None:
    """The page's way for `nn.DataParallel`: the region belongs to ``forward``, since it runs in threads."""

    class Decorated(Net):
        @autocast("cpu", dtype=dtype, policy="unified")
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images)

    torch.manual_seed(0)
    model = Decorated().eval()
    work = [images for images, _ in batches(6)]
    with torch.no_grad():
        expected = [model(images) for images in work]

    def call(images: Tensor) -> Tensor:
        with torch.no_grad():
            return model(images)

    with ThreadPoolExecutor(3) as pool:
        assert_all_equal(list(pool.map(call, work)), expected)
    assert expected[0].dtype is dtype


@low_dtypes
def test_default_policy_steers_the_pages_training_loop(dtype: torch.dtype) -> None:
    expected = train(torch_region(dtype, enabled=False))
    mezzo.torch.set_default_policy("fp32")
    try:
        steered = train(torch_region(dtype))
    finally:
        mezzo.torch.set_default_policy(None)
    assert steered[0] == expected[0]
    assert_all_equal(steered[1], expected[1])
    assert train(torch_region(dtype))[0] != expected[0]
