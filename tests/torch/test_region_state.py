"""The state a region sets and restores, its errors and its warnings: PyTorch's, checked on PyTorch first.

Where the two must agree, a test runs on both classes; so what it says is what PyTorch does. Where PyTorch is known to
be wrong (re-entry, unpaired exits), it runs on mezzo's alone.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import mezzo.torch
from mezzo.errors import MezzoError, RegionError

LOW = (torch.bfloat16, torch.float16)
UNSUPPORTED = (
    "In {0} autocast, but the target dtype is not supported. Disabling autocast.\n"
    "{0} Autocast only supports dtypes of torch.bfloat16, torch.float16 currently."
)
NO_CUDA = "CUDA is not available or torch_xla is imported. Disabling autocast."

low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)


@pytest.fixture(params=[torch.autocast, mezzo.torch.autocast], ids=["torch", "mezzo"])
def autocast(request: pytest.FixtureRequest) -> Any:
    return request.param


def state(device: str = "cpu") -> tuple[bool, torch.dtype, bool, int]:
    """Give PyTorch's state in this thread: enabled, dtype, cache flag, nesting."""
    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
        nesting,
    )


OUTSIDE = (False, torch.bfloat16, True, 0)


# Entering and leaving


@low_dtypes
def test_a_region_sets_the_state_that_pytorch_can_be_asked_for(autocast, low):
    with autocast("cpu", dtype=low) as region:
        assert isinstance(region, autocast)
        assert state() == (True, low, True, 1)
        assert torch._C._is_any_autocast_enabled()
        assert not torch.is_autocast_enabled()  # without an argument it asks for CUDA
    assert state() == OUTSIDE
    assert not torch._C._is_any_autocast_enabled()


def test_nested_regions_restore_flag_dtype_and_cache_flag_one_by_one(autocast):
    with autocast("cpu", dtype=torch.float16, cache_enabled=False):
        with autocast("cpu", dtype=torch.bfloat16, enabled=False, cache_enabled=True):
            with autocast("cpu"):
                assert state() == (True, torch.bfloat16, True, 3)
            assert state() == (False, torch.bfloat16, True, 2)
        assert state() == (True, torch.float16, False, 1)
    assert state() == OUTSIDE


def test_an_exception_restores_the_state(autocast):
    with pytest.raises(KeyError), autocast("cpu", dtype=torch.float16, cache_enabled=False):
        raise KeyError
    assert state() == OUTSIDE


def test_exit_returns_false_so_that_nothing_is_swallowed(autocast):
    region = autocast("cpu")
    region.__enter__()
    assert region.__exit__(None, None, None) is False


def test_the_cache_flag_is_read_when_the_region_is_made(autocast):
    with autocast("cpu", cache_enabled=False):
        made_inside = autocast("cpu")
        with autocast("cpu"):
            assert not torch.is_autocast_cache_enabled()
    with made_inside:
        assert not torch.is_autocast_cache_enabled()


def test_the_dtype_is_read_when_the_region_is_made(autocast):
    made_outside = autocast("cpu")
    decorated = autocast("cpu")(state)
    with autocast("cpu", dtype=torch.float16):
        made_inside = autocast("cpu")
        with made_outside:
            assert state()[:2] == (True, torch.bfloat16)
        assert decorated()[:2] == (True, torch.bfloat16)
    with made_inside:
        assert state()[:2] == (True, torch.float16)


def test_a_disabled_region_records_its_dtype_all_the_same(autocast):
    with autocast("cpu", dtype=torch.float32, enabled=False):
        assert state()[:2] == (False, torch.float32)
    with autocast("cpu", dtype=torch.float16, enabled=False), autocast("cpu"):
        assert state()[:2] == (True, torch.float16)


def test_device_types_are_independent(autocast):
    with autocast("cpu", dtype=torch.float16), autocast("xpu", dtype=torch.bfloat16):
        with autocast("cpu", enabled=False):
            assert state("cpu")[:2] == (False, torch.float16)
            assert state("xpu")[:2] == (True, torch.bfloat16)
            assert state("mps")[:2] == (False, torch.float16)
        assert state("cpu")[:2] == (True, torch.float16)
    assert state("xpu")[:2] == (False, torch.float16)


def test_a_device_may_be_named_with_an_index(autocast):
    assert mezzo.torch.is_autocast_available("cuda:0") is torch.amp.is_autocast_available("cuda:0") is True
    with autocast("cpu:0", dtype=torch.float16):
        assert state()[:2] == (True, torch.float16)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
    assert state() == OUTSIDE


def test_a_policy_rules_on_a_device_that_is_named_with_an_index():
    with mezzo.torch.autocast("cpu:0", policy="fp32"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


DEFAULTS = {
    **dict.fromkeys(["cuda", "xpu", "mps", "mtia", "ipu"], torch.float16),
    **dict.fromkeys(["cpu", "hpu", "maia", "xla"], torch.bfloat16),
}


@pytest.mark.parametrize(("device", "dtype"), DEFAULTS.items(), ids=str)
def test_each_device_has_its_default_dtype(autocast, device, dtype):
    with autocast(device, enabled=False) as region:
        assert region.fast_dtype == dtype
        assert state(device)[:2] == (False, dtype)


def test_a_new_thread_starts_with_the_defaults(autocast):
    seen = []
    with autocast("cpu", dtype=torch.float16, cache_enabled=False):
        thread = threading.Thread(target=lambda: seen.append(state()))
        thread.start()
        thread.join()
    assert seen == [OUTSIDE]


# Warn and disable


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, "bf16"], ids=str)
def test_an_unsupported_dtype_warns_and_disables_and_is_recorded(autocast, dtype):
    with pytest.warns(UserWarning, match="Disabling autocast") as caught:
        region = autocast("cpu", dtype=dtype)
    assert [str(warning.message) for warning in caught] == [UNSUPPORTED.format("CPU")]
    assert region.fast_dtype == dtype
    if isinstance(dtype, torch.dtype):
        with region:
            assert state() == (False, dtype, True, 1)


def test_the_warning_names_the_device(autocast):
    with pytest.warns(UserWarning, match="Disabling autocast") as caught:
        autocast("mps", dtype=torch.float32)
    assert str(caught[0].message) == UNSUPPORTED.format("MPS")


def test_a_region_inside_one_of_unsupported_dtype_takes_that_up_and_is_disabled_too(autocast):
    with autocast("cpu", dtype=torch.float16):
        with pytest.warns(UserWarning, match="In CPU autocast"):
            outer = autocast("cpu", dtype=torch.float32)
        with outer:
            with pytest.warns(UserWarning, match="In CPU autocast"):
                inner = autocast("cpu")
            with inner:
                assert state() == (False, torch.float32, True, 3)
        assert state()[:2] == (True, torch.float16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_cuda_without_cuda_warns_and_is_disabled(autocast, dtype):
    with pytest.warns(UserWarning, match="Disabling autocast") as caught:
        region = autocast("cuda", dtype=dtype)
    assert [str(warning.message) for warning in caught] == [NO_CUDA]
    with region:
        assert state("cuda")[:2] == (False, dtype or torch.float16)


def test_a_disabled_region_neither_checks_nor_warns(autocast):
    for device, dtype in (("cuda", None), ("cpu", torch.float32), ("mps", torch.int8)):
        with autocast(device, dtype=dtype, enabled=False):
            assert not torch.is_autocast_enabled(device)


def test_a_warning_points_at_the_line_that_made_the_region():
    def make() -> Any:
        return mezzo.torch.autocast("cpu", dtype=torch.float32)

    with pytest.warns(UserWarning, match="Disabling autocast") as caught:
        make()
    assert caught[0].filename == __file__
    assert caught[0].lineno == make.__code__.co_firstlineno + 1


# Errors


@pytest.mark.parametrize("device", [torch.device("cpu"), None, 0], ids=str)
def test_a_device_that_is_no_string_is_a_value_error(autocast, device):
    with pytest.raises(ValueError) as caught:
        autocast(device)
    assert str(caught.value) == f"Expected `device_type` of type `str`, got: `{type(device)}`"


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("device", "start", "end"),
    [
        ("banana", "Expected one of cpu, cuda, ", " device type at start of device string: banana"),
        ("not a real device", "Invalid device string: ", "'not a real device'"),
        ("meta", "unsupported scalarType", ""),
        ("vulkan", "unsupported scalarType", ""),
    ],
)
def test_a_string_that_is_no_autocast_device_is_a_runtime_error(autocast, device, start, end, enabled):
    with pytest.raises(RuntimeError) as caught:
        autocast(device, enabled=enabled)
    text = str(caught.value)
    assert text.startswith(start)
    assert text.endswith(end)


def test_a_device_without_autocast_is_named_in_the_error_when_a_dtype_is_given(autocast):
    with pytest.raises(RuntimeError) as caught:
        autocast("meta", dtype=torch.bfloat16)
    assert str(caught.value) == "User specified an unsupported autocast device_type 'meta'"


@pytest.mark.parametrize("available", [torch.amp.is_autocast_available, mezzo.torch.is_autocast_available])
def test_availability_is_asked_by_a_string_that_names_a_device(available):
    assert all(available(device) for device in ("cpu", "mps", "privateuseone"))
    assert not any(available(device) for device in ("meta", "vulkan"))
    with pytest.raises(RuntimeError, match=r"^Invalid device string: 'not a real device'$"):
        available("not a real device")
    with pytest.raises(RuntimeError, match=r"device type at start of device string: nope$"):
        available("nope")
    with pytest.raises(TypeError):
        available(torch.device("cpu"))


def test_leaving_a_region_that_was_not_entered_is_an_error_and_changes_nothing():
    region = mezzo.torch.autocast("cpu", dtype=torch.float16)
    with region:
        pass
    with pytest.raises(RegionError) as caught:
        region.__exit__(None, None, None)
    assert isinstance(caught.value, MezzoError)
    assert isinstance(caught.value, RuntimeError)
    assert str(caught.value) == (
        "autocast.__exit__() was called in a thread that has not entered this region; use it in a `with` statement, "
        "or call __enter__() and __exit__() in pairs in one thread."
    )
    assert state() == OUTSIDE


def test_a_region_entered_twice_is_left_twice_and_not_three_times():
    region = mezzo.torch.autocast("cpu", dtype=torch.float16)
    with region, region:
        assert state() == (True, torch.float16, True, 2)
    with pytest.raises(RegionError):
        region.__exit__(None, None, None)
    assert state() == OUTSIDE
