"""On a real GPU: the page's CUDA examples, with `mezzo.torch.autocast` in the place of ``torch.autocast``, by value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo.torch import active_policy, autocast, custom_bwd, custom_fwd, set_default_policy

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LOW = (torch.float16, torch.bfloat16)
# Two runs of the same kernels on a GPU may add up in another order; a low result then differs in its last bit.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
low_dtypes = pytest.mark.parametrize("dtype", LOW, ids=str)
Region = Callable[..., Any]


@pytest.fixture(autouse=True)
def _plain_float32_and_fixed_algorithms() -> Iterator[None]:
    """TF32 would make float32 results differ from op to op; cuDNN picks other algorithms from run to run."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cudnn.deterministic, matmul.allow_tf32
    cudnn.allow_tf32, cudnn.deterministic, matmul.allow_tf32 = False, True, False
    yield
    cudnn.allow_tf32, cudnn.deterministic, matmul.allow_tf32 = before


def assert_near(got: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Same dtype, and values within the tolerance of the largest."""
    assert got.dtype is expected.dtype
    assert torch.isfinite(got).all()
    bound = (TOLERANCE[got.dtype] if tolerance is None else tolerance) * max(expected.abs().max().item(), 1e-3)
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=bound)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(256, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return images.to(DEVICE), torch.tensor(labels).to(DEVICE)


def train(region: Region, *, scaled: bool, steps: int = 20) -> list[float]:
    """The page's training loop, with PyTorch's own scaler where gradients are float16."""
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, enabled=scaled, init_scale=2.0**10)
    images, labels = digits()
    losses = []
    for start in range(0, 64 * steps, 64):
        optimizer.zero_grad()
        with region():
            output = model(images[start : start + 64])
            loss = nn.functional.cross_entropy(output, labels[start : start + 64])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() == (2.0**10 if scaled else 1.0)
    return losses


@low_dtypes
@pytest.mark.parametrize("policy", [None, "torch", "unified"])
def test_training_loop_follows_pytorchs_losses(dtype: torch.dtype, policy: str | None) -> None:
    scaled = dtype is torch.float16
    losses = train(functools.partial(autocast, DEVICE, dtype=dtype, policy=policy), scaled=scaled)
    expected = train(functools.partial(torch.autocast, DEVICE, dtype=dtype), scaled=scaled)
    # Twenty steps spread the last bit of a low-precision sum.
    assert losses == pytest.approx(expected, rel=0.02, abs=0.02)
    assert losses[-1] < losses[0] / 2


def test_training_loop_under_fp32_is_float32_training() -> None:
    losses = train(functools.partial(autocast, DEVICE, policy="fp32"), scaled=False)
    reference = train(functools.partial(torch.autocast, DEVICE, enabled=False), scaled=False)
    assert losses == pytest.approx(reference, rel=1e-3, abs=1e-3)


@low_dtypes
def test_products_of_float32_and_of_mixed_inputs(dtype: torch.dtype) -> None:
    a, b, c, d = torch.rand(4, 8, 8, device=DEVICE)
    with autocast(DEVICE, dtype=dtype):
        e = torch.mm(a, b)
        f = torch.mm(d, e)
    assert_near(f, d.to(dtype) @ (a.to(dtype) @ b.to(dtype)))
    assert_near(torch.mm(c, f.float()), c @ f.float())


def test_default_dtype_is_float16() -> None:
    with autocast(DEVICE):
        assert (torch.rand(8, 8, device=DEVICE) @ torch.rand(8, 8, device=DEVICE)).dtype is torch.float16


@low_dtypes
@pytest.mark.parametrize("policy", [None, "unified"])
def test_nested_disabled_region(dtype: torch.dtype, policy: str | None) -> None:
    a, b, c = torch.rand(3, 8, 8, device=DEVICE)
    with autocast(DEVICE, dtype=dtype, policy=policy):
        low = torch.mm(a, b)
        with autocast(DEVICE, enabled=False):
            full = torch.mm(c, low.float())
        again = torch.mm(full, c)
    assert (low.dtype, full.dtype, again.dtype) == (dtype, torch.float32, dtype)
    assert_near(full, c @ low.float())
    assert_near(again, full.to(dtype) @ c.to(dtype))


@low_dtypes
def test_decorator_on_forward(dtype: torch.dtype) -> None:
    class Decorated(Net):
        @autocast(DEVICE, dtype=dtype)
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images)

    torch.manual_seed(0)
    model = Decorated().to(DEVICE)
    images = digits()[0][:16]
    with torch.autocast(DEVICE, dtype=dtype):
        expected = Net.forward(model, images)
    assert_near(model(images), expected)


def matmul_function(seen: list[Any], **options: Any) -> type[torch.autograd.Function]:
    class MyMM(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=DEVICE, **options)
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a.mm(b)

        @staticmethod
        @custom_bwd(device_type=DEVICE)
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            left, right = gradient.mm(b.t()), a.t().mm(gradient)
            seen.append((left.dtype, torch.is_autocast_enabled(DEVICE), active_policy(DEVICE).name))
            return left, right

    return MyMM


@low_dtypes
@pytest.mark.parametrize("policy", ["torch", "unified", "fp32"])
def test_custom_function_goes_backward_in_autograds_thread_as_it_went_forward(dtype: torch.dtype, policy: str) -> None:
    seen: list[Any] = []
    a, b = (torch.rand(8, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    with autocast(DEVICE, dtype=dtype, policy=policy):
        output = matmul_function(seen).apply(a, b)
    output.float().sum().backward()
    computed = torch.float32 if policy == "fp32" else dtype
    assert output.dtype is computed
    assert seen == [(computed, True, policy)]
    assert_near(a.grad, torch.ones(8, 8, device=DEVICE) @ b.detach().t(), TOLERANCE[computed])


@pytest.mark.parametrize("target", [torch.float32, torch.float16], ids=str)
def test_custom_function_that_needs_one_dtype(target: torch.dtype) -> None:
    seen: list[Any] = []
    a, b = (torch.rand(8, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    with autocast(DEVICE, dtype=torch.bfloat16, policy="unified"):
        output = matmul_function(seen, cast_inputs=target).apply(a, b)
    output.float().sum().backward()
    assert output.dtype is target
    assert seen == [(target, False, "unified")]


def checkpointed(region: Any, reentrant: bool | None, *, inside: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.LayerNorm(64), nn.Linear(64, 64)).to(DEVICE)
    x = torch.rand(16, 64, device=DEVICE, requires_grad=True)
    with region:
        output = net(x) if reentrant is None else checkpoint(net, x, use_reentrant=reentrant)
        loss = output.float().square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [x.grad, *(parameter.grad for parameter in net.parameters())]


@low_dtypes
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_gradients_without_it(dtype: torch.dtype, reentrant: bool) -> None:
    got = checkpointed(autocast(DEVICE, dtype=dtype), reentrant)
    for one, other in zip(got, checkpointed(torch.autocast(DEVICE, dtype=dtype), None), strict=True):
        assert_near(one, other, TOLERANCE[dtype])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_under_a_default_policy(reentrant: bool) -> None:
    """The recomputation runs in a thread of autograd's; the process-wide default reaches it."""
    expected = checkpointed(torch.autocast(DEVICE, enabled=False), None)
    set_default_policy("fp32")
    try:
        got = checkpointed(torch.autocast(DEVICE), reentrant)
    finally:
        set_default_policy(None)
    for one, other in zip(got, expected, strict=True):
        assert_near(one, other)


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this PyTorch cannot carry a policy safely")
def test_backward_inside_a_region_follows_its_policy() -> None:
    got = checkpointed(autocast(DEVICE, policy="fp32"), None, inside=True)
    for one, other in zip(got, checkpointed(torch.autocast(DEVICE, enabled=False), None), strict=True):
        assert_near(one, other)


def test_auto_covers_the_gpu_and_the_cpu() -> None:
    with autocast("auto", policy="unified"):
        on_gpu, on_cpu = (torch.rand(8, 8, device=device) for device in (DEVICE, "cpu"))
        assert (on_gpu @ on_gpu).dtype is torch.float16
        assert (on_cpu @ on_cpu).dtype is torch.bfloat16
        assert on_gpu.half().softmax(-1).dtype is on_cpu.bfloat16().softmax(-1).dtype is torch.float32
    with autocast("auto", dtype=torch.bfloat16):
        assert (on_gpu @ on_gpu).dtype is (on_cpu @ on_cpu).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled(DEVICE)
