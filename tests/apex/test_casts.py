"""O1 on mezzo's autocast: on from `start` to `stop`, in this thread, wherever ops are called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mezzo.torch
from mezzo.apex.amp import casts
from mezzo.apex.amp.cast_state import nesting
from mezzo.errors import AmpOptionError, BannedOpError, UnknownOpError

LOW = (torch.float16, torch.bfloat16)
low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)


def start(low: torch.dtype = torch.float16) -> casts.Handle:
    return casts.start(["cpu"], low, {})


def product() -> torch.dtype:
    """Say in which dtype a product of float32 matrices comes."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def state() -> tuple[object, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        nesting(),
        mezzo.torch.active_policy("cpu").name,
        [device for device in ("maia", "ipu", "xla") if torch.is_autocast_enabled(device)],
    )


# From start to stop


@low_dtypes
def test_ops_are_cast_wherever_they_are_called_after_start(low: torch.dtype) -> None:
    net = nn.Linear(4, 4)
    before = net(torch.ones(2, 4))
    handle = start(low)
    output = net(torch.ones(2, 4))
    loss = F.mse_loss(output, torch.zeros(2, 4, dtype=low))
    assert (before.dtype, output.dtype, loss.dtype) == (torch.float32, low, torch.float32)
    assert handle.is_active()
    assert mezzo.torch.active_policy("cpu").name == "apex-o1"


@low_dtypes
def test_stop_leaves_the_state_as_it_was(low: torch.dtype) -> None:
    before = state()
    handle = start(low)
    assert state() != before
    casts.stop()
    assert state() == before
    assert not handle.is_active()
    casts.stop()
    assert state() == before


def test_only_the_named_devices_are_cast() -> None:
    casts.start(["xpu"], torch.float16, {})
    assert product() is torch.float32
    assert torch.is_autocast_enabled("xpu")
    casts.stop()
    assert not torch.is_autocast_enabled("xpu")
    start()
    assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("xpu")


def test_several_devices_are_left_together() -> None:
    before = state()
    casts.start(["xpu", "cpu", "cpu"], torch.float16, {})
    assert (nesting(), product()) == (2, torch.float16)
    casts.stop()
    assert state() == before


def test_a_second_start_ends_the_first() -> None:
    first = start(torch.float16)
    second = start(torch.bfloat16)
    assert (product(), nesting()) == (torch.bfloat16, 1)
    assert (first.is_active(), second.is_active()) == (False, True)


def test_a_start_that_fails_leaves_the_earlier_one_on() -> None:
    first = start()
    with pytest.raises(UnknownOpError, match="no op"):
        casts.start(["cpu"], torch.float16, {"no_such_op": "fp32"})
    with pytest.raises(RuntimeError, match="nonsense"):
        casts.start(["nonsense"], torch.float16, {})
    assert first.is_active()
    assert product() is torch.float16


@pytest.mark.parametrize(
    ("devices", "dtype", "text"),
    [
        ([], torch.float16, r"need a list of device types such as \['cuda'\], got \[\]"),
        ("cpu", torch.float16, "need a list of device types .* got 'cpu'"),
        (["cpu"], torch.float32, r"torch\.float16 or torch\.bfloat16, got torch\.float32"),
    ],
)
def test_wrong_arguments_are_named(devices: list[str], dtype: torch.dtype, text: str) -> None:
    with pytest.raises(AmpOptionError, match=text):
        casts.start(devices, dtype, {})


def test_rules_go_before_the_lists_of_apex() -> None:
    x = torch.ones(2, 2)
    start()
    assert (torch.exp(x.half()).dtype, torch.sigmoid(x.half()).dtype) == (torch.float32, torch.float16)
    casts.start(["cpu"], torch.float16, {"exp": "lower_precision_fp", "sigmoid": "fp32"})
    assert (torch.exp(x).dtype, torch.sigmoid(x.half()).dtype) == (torch.float16, torch.float32)


def test_binary_cross_entropy_is_banned_unless_allowed() -> None:
    p, y = torch.full((3,), 0.5), torch.ones(3)
    start()
    with pytest.raises(BannedOpError, match="binary_cross_entropy"):
        F.binary_cross_entropy(p.half(), y.half())
    casts.start(["cpu"], torch.float16, {}, allow_banned=True)
    assert F.binary_cross_entropy(p.half(), y.half()).dtype is torch.float32


# Regions of the user's


def test_a_disabled_region_inside_is_one() -> None:
    start()
    with torch.autocast("cpu", enabled=False):
        assert product() is torch.float32
    assert product() is torch.float16


@pytest.mark.parametrize("kind", [torch.autocast, mezzo.torch.autocast], ids=["torch", "mezzo"])
def test_a_region_of_another_dtype_inside_has_the_rules_of_apex(kind: type) -> None:
    start(torch.float16)
    with kind("cpu", dtype=torch.bfloat16):
        assert product() is torch.bfloat16
        # float32 by Apex, not listed by PyTorch for the CPU.
        assert torch.ones(2, dtype=torch.bfloat16).exp().dtype is torch.float32
    assert product() is torch.float16


def test_a_region_with_a_policy_inside_has_its_own_rules() -> None:
    start()
    with mezzo.torch.autocast("cpu", dtype=torch.float16, policy="torch"):
        assert torch.ones(2).half().exp().dtype is torch.float16
    assert torch.ones(2).half().exp().dtype is torch.float32


def test_a_region_around_start_and_stop_is_as_before() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = state()
        start()
        assert product() is torch.float16
        casts.stop()
        assert state() == before
        assert product() is torch.bfloat16


OUTER = {
    "torch": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "torch, same dtype": lambda: torch.autocast("cpu", dtype=torch.float16),
    "torch, another device": lambda: torch.autocast("xpu", dtype=torch.bfloat16),
    "mezzo": lambda: mezzo.torch.autocast("cpu", dtype=torch.bfloat16),
    "mezzo, another policy": lambda: mezzo.torch.autocast("cpu", dtype=torch.bfloat16, policy="fp32"),
    "keep_casts": mezzo.torch.keep_casts,
}
outer_regions = pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)


@outer_regions
def test_after_a_region_around_start_has_ended_stop_leaves_no_trace(
    outer: Callable[[], AbstractContextManager[None]],
) -> None:
    before = state()
    with outer():
        start()
    casts.stop()
    assert state() == before


@outer_regions
def test_after_a_region_around_start_has_ended_a_watched_model_is_cast_and_stop_leaves_no_trace(
    outer: Callable[[], AbstractContextManager[None]],
) -> None:
    net = nn.Linear(2, 2)
    casts.watch_model(net)
    before = state()
    with outer():
        start()
    assert net(torch.ones(1, 2)).dtype is torch.float16
    assert (product(), nesting()) == (torch.float16, 1)
    assert torch.ones(2).half().exp().dtype is torch.float32
    casts.stop()
    assert state() == before


def test_a_disabled_region_around_a_watched_model_stays_disabled() -> None:
    net = nn.Linear(2, 2)
    casts.watch_model(net)
    start()
    with torch.autocast("cpu", enabled=False):
        assert net(torch.ones(1, 2)).dtype is torch.float32
