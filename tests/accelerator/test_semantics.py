"""What a region means on a plugged-in accelerator, for `torch.autocast` and `mezzo.torch.autocast` alike: its state.

These are the points that PyTorch's own tests of accelerators check, and the rest of what its pages promise.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import mezzo.torch

from .both import DEVICE, Autocast, both_classes, low_dtypes, on_device, product_dtype

UNSUPPORTED = (
    "In standin autocast, but the target dtype is not supported. Disabling autocast.\n"
    "standin Autocast only supports dtypes of torch.float16, torch.bfloat16 currently."
)


def test_autocast_is_available() -> None:
    assert torch.amp.is_autocast_available(DEVICE)


@both_classes
def test_the_default_dtype_is_float16(autocast: Autocast) -> None:
    assert torch.get_autocast_dtype(DEVICE) is torch.float16
    with autocast(DEVICE):
        assert torch.get_autocast_dtype(DEVICE) is torch.float16
        assert product_dtype() is torch.float16


@both_classes
def test_the_dtype_that_is_set_is_that_of_regions_that_name_none(autocast: Autocast) -> None:
    torch.set_autocast_dtype(DEVICE, torch.bfloat16)
    try:
        with autocast(DEVICE):
            assert product_dtype() is torch.bfloat16
        assert torch.get_autocast_dtype(DEVICE) is torch.bfloat16
    finally:
        torch.set_autocast_dtype(DEVICE, torch.float16)


@both_classes
@low_dtypes
def test_pytorch_tells_the_state_inside(autocast: Autocast, low: torch.dtype) -> None:
    with autocast(DEVICE, dtype=low):
        assert torch.is_autocast_enabled(DEVICE)
        assert torch.get_autocast_dtype(DEVICE) is low
        assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled(DEVICE)


@both_classes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32], ids=str)
def test_an_unsupported_dtype_warns_and_disables_the_region(autocast: Autocast, dtype: torch.dtype) -> None:
    with pytest.warns(UserWarning, match="In standin autocast") as warned:
        region = autocast(DEVICE, dtype=dtype)
    assert [str(warning.message) for warning in warned] == [UNSUPPORTED]
    assert warned[0].filename == __file__
    with region:
        assert not torch.is_autocast_enabled(DEVICE)
        assert product_dtype() is torch.float32


@both_classes
def test_an_unsupported_dtype_inside_a_region_disables_the_inner_one_alone(autocast: Autocast) -> None:
    with autocast(DEVICE):
        with pytest.warns(UserWarning, match="the target dtype is not supported"), autocast(DEVICE, torch.float32):
            assert product_dtype() is torch.float32
        assert product_dtype() is torch.float16


@both_classes
def test_regions_nest(autocast: Autocast) -> None:
    with autocast(DEVICE):
        assert product_dtype() is torch.float16
        with autocast(DEVICE, enabled=False):
            assert product_dtype() is torch.float32
            with autocast(DEVICE, dtype=torch.bfloat16):
                assert product_dtype() is torch.bfloat16
            with autocast(DEVICE):
                assert product_dtype() is torch.float16
            assert product_dtype() is torch.float32
        assert product_dtype() is torch.float16
    assert product_dtype() is torch.float32


@both_classes
def test_one_class_inside_the_other(autocast: Autocast) -> None:
    other = mezzo.torch.autocast if autocast is torch.autocast else torch.autocast
    with autocast(DEVICE):
        with other(DEVICE, dtype=torch.bfloat16):
            assert product_dtype() is torch.bfloat16
        with other(DEVICE, enabled=False):
            assert product_dtype() is torch.float32
        assert product_dtype() is torch.float16


@both_classes
def test_an_exception_ends_the_region(autocast: Autocast) -> None:
    with pytest.raises(ValueError, match="mine"), autocast(DEVICE, dtype=torch.bfloat16):
        raise ValueError("mine")
    assert not torch.is_autocast_enabled(DEVICE)
    assert torch.get_autocast_dtype(DEVICE) is torch.float16
    assert product_dtype() is torch.float32


@both_classes
def test_an_op_that_raises_leaves_the_region_as_it_was(autocast: Autocast) -> None:
    with autocast(DEVICE):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(on_device(2, 3), on_device(2, 3))
        assert product_dtype() is torch.float16


@both_classes
def test_another_thread_sees_nothing_of_it(autocast: Autocast) -> None:
    found: list[object] = []

    def look() -> None:
        found.extend([torch.is_autocast_enabled(DEVICE), torch.get_autocast_dtype(DEVICE), product_dtype()])
        with autocast(DEVICE):
            found.append(product_dtype())

    with autocast(DEVICE, dtype=torch.bfloat16):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert product_dtype() is torch.bfloat16
    assert found == [False, torch.float16, torch.float32, torch.float16]


@both_classes
@low_dtypes
def test_as_a_decorator(autocast: Autocast, low: torch.dtype) -> None:
    @autocast(DEVICE, dtype=low)
    def decorated(device: str) -> torch.dtype:
        return product_dtype(device)

    assert decorated(DEVICE) is low
    assert decorated("cpu") is torch.float32
    assert product_dtype() is torch.float32


@both_classes
@low_dtypes
def test_a_decorated_forward(autocast: Autocast, low: torch.dtype) -> None:
    class Model(nn.Linear):
        @autocast(DEVICE, dtype=low)
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs)

    model = Model(3, 2).to(DEVICE)
    result = model(on_device(4, 3))
    assert result.dtype is low
    result.float().sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
