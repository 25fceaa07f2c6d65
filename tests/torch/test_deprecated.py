"""PyTorch's deprecated spellings, ``cuda.amp`` and ``cpu.amp``: signatures, warnings, behaviour."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import mezzo.torch

if TYPE_CHECKING:
    from collections.abc import Callable

PAIRS = {
    "cuda.amp.autocast": (mezzo.torch.cuda.amp.autocast, torch.cuda.amp.autocast),
    "cpu.amp.autocast": (mezzo.torch.cpu.amp.autocast, torch.cpu.amp.autocast),
    "cuda.amp.GradScaler": (mezzo.torch.cuda.amp.GradScaler, torch.cuda.amp.GradScaler),
    "cpu.amp.GradScaler": (mezzo.torch.cpu.amp.GradScaler, torch.cpu.amp.GradScaler),
    "cuda.amp.custom_fwd": (mezzo.torch.cuda.amp.custom_fwd, torch.cuda.amp.custom_fwd),
    "cuda.amp.custom_bwd": (mezzo.torch.cuda.amp.custom_bwd, torch.cuda.amp.custom_bwd),
}
LOW = (torch.bfloat16, torch.float16)
NO_CUDA = "ignore:CUDA is not available:UserWarning"
DEPRECATED = r"is deprecated\. Please use"

low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)


def product() -> Tensor:
    return torch.ones(2, 2) @ torch.ones(2, 2)


def messages(call: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Give the texts and the files of the deprecations that a call shows."""
    with pytest.warns(FutureWarning, match=DEPRECATED) as caught:
        call()
    found = [warning for warning in caught if warning.category is FutureWarning]
    return [str(warning.message) for warning in found], [warning.filename for warning in found]


# Signatures


@pytest.mark.parametrize("name", PAIRS)
def test_the_parameters_are_pytorchs(name):
    ours, theirs = (inspect.signature(spelling).parameters.values() for spelling in PAIRS[name])
    facts = [[(parameter.name, parameter.kind, parameter.default) for parameter in each] for each in (ours, theirs)]
    assert facts[0] == facts[1]


def test_the_namespaces_name_what_they_offer():
    assert set(mezzo.torch.cuda.amp.__all__) == {"GradScaler", "autocast", "custom_bwd", "custom_fwd"}
    assert set(mezzo.torch.cpu.amp.__all__) == {"GradScaler", "autocast"}
    assert issubclass(mezzo.torch.cpu.amp.autocast, mezzo.torch.autocast)
    assert issubclass(mezzo.torch.cuda.amp.autocast, mezzo.torch.autocast)
    assert issubclass(mezzo.torch.cpu.amp.GradScaler, mezzo.torch.GradScaler)
    assert issubclass(mezzo.torch.cuda.amp.GradScaler, mezzo.torch.GradScaler)


# Warnings


@pytest.mark.parametrize("name", ["autocast", "GradScaler"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_making_one_warns_in_pytorchs_words_under_mezzos_names(device, name):
    ours, theirs = PAIRS[f"{device}.amp.{name}"]
    texts, files = messages(lambda: ours(enabled=False))
    assert texts == [
        (
            f"`mezzo.torch.{device}.amp.{name}(args...)` is deprecated. "
            f"Please use `mezzo.torch.{name}('{device}', args...)` instead."
        )
    ]
    assert files == [__file__]
    native, _ = messages(lambda: theirs(enabled=False))
    assert texts[0].replace(f"mezzo.torch.{name}", f"torch.amp.{name}").replace("mezzo.torch", "torch") == native[0]


@pytest.mark.parametrize("name", ["custom_fwd", "custom_bwd"])
def test_decorating_warns_in_pytorchs_words_under_mezzos_names(name):
    ours, theirs = PAIRS[f"cuda.amp.{name}"]
    texts, files = messages(lambda: ours(product))
    assert texts == [
        (
            f"`mezzo.torch.cuda.amp.{name}(args...)` is deprecated. "
            f"Please use `mezzo.torch.{name}(args..., device_type='cuda')` instead."
        )
    ]
    assert files == [__file__]
    native, _ = messages(lambda: theirs(product))
    assert texts[0].replace(f"`mezzo.torch.{name}", f"`torch.amp.{name}").replace("mezzo.torch", "torch") == native[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_the_cuda_spelling_without_cuda_warns_of_that_too_and_is_disabled():
    with pytest.warns(FutureWarning, match=DEPRECATED), pytest.warns(UserWarning, match="^CUDA is not available"):
        region = mezzo.torch.cuda.amp.autocast()
    with region:
        assert not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.float16


# Behaviour


def old_region(*args: Any, **kwargs: Any) -> Any:
    with pytest.warns(FutureWarning, match=DEPRECATED):
        return mezzo.torch.cpu.amp.autocast(*args, **kwargs)


@low_dtypes
def test_the_cpu_spelling_is_a_region_on_the_cpu(low):
    with old_region(dtype=low) as region:
        assert isinstance(region, mezzo.torch.autocast)
        assert product().dtype == low
    assert product().dtype == torch.float32


def test_arguments_may_be_given_by_place():
    with old_region(True, torch.float16, False):
        assert product().dtype == torch.float16
        assert not torch.is_autocast_cache_enabled()
    with old_region(False):
        assert product().dtype == torch.float32


def test_its_defaults_are_fixed_and_not_those_in_force():
    with mezzo.torch.autocast("cpu", dtype=torch.float16, cache_enabled=False), old_region():
        assert product().dtype == torch.bfloat16
        assert torch.is_autocast_cache_enabled()


@low_dtypes
def test_it_takes_the_policy_in_force(low):
    with mezzo.torch.autocast("cpu", policy="fp32"), old_region(dtype=low):
        assert product().dtype == torch.float32


@low_dtypes
def test_it_decorates_and_warns_once_when_made(low):
    decorated = old_region(dtype=low)(lambda: product().dtype)
    assert [decorated(), decorated()] == [low, low]


def old_scaler(*args: Any, **kwargs: Any) -> Any:
    with pytest.warns(FutureWarning, match=DEPRECATED):
        return mezzo.torch.cpu.amp.GradScaler(*args, **kwargs)


def test_the_old_scaler_scales_on_the_cpu_by_the_numbers_given_by_place():
    scaler = old_scaler(8.0, 3.0, 0.25, 1)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scales = []
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [24.0, 6.0]
    assert weight.tolist() == [0.5]


def test_the_old_scaler_is_pickled_and_copied_under_its_own_name_without_a_warning():
    scaler = old_scaler(8.0)
    for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert type(twin) is mezzo.torch.cpu.amp.GradScaler
        assert twin.get_scale() == 8.0
    assert not old_scaler(enabled=False).is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_the_old_scaler_of_cuda_without_cuda_is_disabled():
    with pytest.warns(FutureWarning, match=DEPRECATED), pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = mezzo.torch.cuda.amp.GradScaler()
    assert not scaler.is_enabled()


def make_function(module: Any) -> type[torch.autograd.Function]:
    """Make a function in the way that PyTorch's page shows it: decorators bare, or with ``cast_inputs``."""
    with pytest.warns(FutureWarning, match=DEPRECATED):

        class Multiply(torch.autograd.Function):
            @staticmethod
            @module.custom_fwd
            def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
                ctx.save_for_backward(a, b)
                return a @ b

            @staticmethod
            @module.custom_bwd
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
                a, b = ctx.saved_tensors
                ctx.seen = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
                seen.append(ctx.seen)
                return grad @ b.t(), a.t() @ grad

    seen: list[Any] = []
    Multiply.seen = seen
    return Multiply


@pytest.mark.parametrize("module", [torch.cuda.amp, mezzo.torch.cuda.amp], ids=["torch", "mezzo"])
@pytest.mark.filterwarnings(NO_CUDA)
@low_dtypes
def test_the_decorators_carry_the_state_of_cuda_to_the_backward_pass(module, low):
    function = make_function(module)
    a, b = (torch.randn(2, 2, requires_grad=True) for _ in range(2))
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", low)
    try:
        result = function.apply(a, b)
    finally:
        torch.set_autocast_dtype("cuda", before)
    result.sum().backward()
    assert function.seen == [(False, low)]
    assert torch.equal(a.grad, b.sum(1).expand(2, 2))


@pytest.mark.parametrize("module", [torch.cuda.amp, mezzo.torch.cuda.amp], ids=["torch", "mezzo"])
@low_dtypes
def test_custom_fwd_with_arguments_is_a_decorator_and_casts_nothing_outside_a_region(module, low):
    with pytest.warns(FutureWarning, match=DEPRECATED):
        decorate = module.custom_fwd(cast_inputs=low)

    class Double(torch.autograd.Function):
        @staticmethod
        @decorate
        def forward(ctx: Any, x: Tensor) -> Tensor:
            state.append((ctx._fwd_used_autocast, ctx._dtype))
            return x * 2

    state: list[Any] = []
    assert Double.apply(torch.ones(1)).dtype == torch.float32
    assert state == [(False, torch.float16)]


@pytest.mark.parametrize("module", [torch.cuda.amp, mezzo.torch.cuda.amp], ids=["torch", "mezzo"])
@low_dtypes
def test_custom_fwd_leaves_tensors_of_another_device_than_cuda_as_they_are(module, low):
    with pytest.warns(FutureWarning, match=DEPRECATED):
        decorate = module.custom_fwd(cast_inputs=low)

    class Double(torch.autograd.Function):
        @staticmethod
        @decorate
        def forward(ctx: Any, x: Tensor) -> Tensor:
            state.append((x.dtype, torch.is_autocast_enabled("cuda"), ctx._fwd_used_autocast))
            return x * 2

    state: list[Any] = []
    torch.set_autocast_enabled("cuda", True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a disabled region inside has nothing to warn of
            Double.apply(torch.ones(1))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert state == [(torch.float32, False, False)]
