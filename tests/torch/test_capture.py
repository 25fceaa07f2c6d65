"""`capture` and `restore`: the whole state of autocast as a value, and put in force again."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mezzo.errors import RegionError
from mezzo.torch import AutocastState, active_policy, autocast, capture, observe, set_default_policy
from mezzo.torch.active import slot_for
from mezzo.torch.cache import casts_of_thread
from mezzo.torch.carrying import DeviceState

from .situations import FULL, IN_FORCE, STATES, bind_to, softmax

LOW = (torch.bfloat16, torch.float16)
low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)
HAS_ACCELERATOR = torch.accelerator.is_available()


def nesting() -> int:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


@pytest.fixture
def default_policy() -> Iterator[Callable[[Any], None]]:
    yield set_default_policy
    set_default_policy(None)


# capture


def cpu() -> DeviceState:
    (found,) = [device for device in capture().devices if device.device_type == "cpu"]
    return found


@low_dtypes
def test_captured_is_what_is_in_force(low: torch.dtype) -> None:
    assert cpu() == DeviceState("cpu", False, torch.bfloat16, None)
    with torch.autocast("cpu", dtype=low):
        assert cpu() == DeviceState("cpu", True, low, None)
        with autocast("cpu", dtype=low, enabled=False, policy="fp32"):
            found = cpu()
            assert (found.enabled, found.policy) == (False, active_policy("cpu"))
            assert active_policy("cpu").name == "fp32"
    assert capture().cache_enabled
    with autocast("cpu", cache_enabled=False):
        assert not capture().cache_enabled


@pytest.mark.skipif(HAS_ACCELERATOR, reason="the accelerator is always among them")
def test_captured_are_the_cpu_and_the_devices_on_which_autocast_is_on() -> None:
    assert [device.device_type for device in capture().devices] == ["cpu"]
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with autocast("xpu", enabled=False, policy="fp32"):
            state = capture()
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert [device.device_type for device in state.devices] == ["cpu", "cuda", "xpu"]
    with state.restore():
        assert capture() == state
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16
        assert active_policy("xpu").name == "fp32"
    assert not torch.is_autocast_enabled("cuda")


def test_a_state_is_a_value() -> None:
    with autocast("cpu", dtype=torch.float16, policy="unified"):
        one, other = capture(), capture()
    assert one == other
    assert len({one, other}) == 1
    assert one != capture()
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.cache_enabled = False
    with pickle.loads(pickle.dumps(one)).restore():
        assert softmax() == (torch.float16, FULL)


# restore


@pytest.mark.parametrize("around", STATES)
@pytest.mark.parametrize("name", STATES)
def test_any_state_can_be_restored_in_any_other_which_is_then_back(name: str, around: str) -> None:
    before = capture()
    with STATES[around].restore():
        with STATES[name].restore():
            assert capture() == STATES[name]
            assert softmax() == IN_FORCE[name]
            with STATES[around].restore():
                assert softmax() == IN_FORCE[around]
            assert capture() == STATES[name]
        assert capture() == STATES[around]
        assert softmax() == IN_FORCE[around]
    assert capture() == before


def test_where_no_policy_was_named_none_is_in_force_and_regions_inside_start_from_the_default() -> None:
    with autocast("cpu", dtype=torch.bfloat16):
        expected = active_policy("cpu")
    with autocast("cpu", policy="fp32"), STATES["plain"].restore():
        assert active_policy("cpu").name == "torch"
        with autocast("cpu", dtype=torch.bfloat16):
            assert active_policy("cpu") == expected
            assert softmax() == (torch.bfloat16, torch.bfloat16)
        assert active_policy("cpu").name == "torch"


def test_where_no_policy_was_named_the_process_wide_default_rules(default_policy: Callable[[Any], None]) -> None:
    bound = {name: bind_to(state, softmax) for name, state in STATES.items()}
    default_policy("unified")
    assert bound["plain"]() == (torch.float16, FULL)
    with autocast("cpu", policy="fp32"):
        assert bound["plain"]() == (torch.float16, FULL)
    assert bound["nested"]() == IN_FORCE["nested"]


def test_the_default_is_followed_on_a_device_that_is_not_there(default_policy: Callable[[Any], None]) -> None:
    state = AutocastState((DeviceState("xpu", True, torch.bfloat16, None),), True)
    default_policy("unified")
    with state.restore():
        assert slot_for("xpu").current().policy.name == "unified"


def test_a_restored_state_counts_as_a_region_and_its_casts_go_with_the_outermost() -> None:
    weight, x = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4)
    with autocast("cpu", policy="unified"):
        state = capture()
    with state.restore():
        assert nesting() >= 1
        first = (x @ weight).sum()
        with state.restore():
            second = (x @ weight).sum()
        kept = len(casts_of_thread())
    assert first.grad_fn is not None
    assert second.dtype is first.dtype
    assert (len(casts_of_thread()), nesting()) == (0, 0)
    assert kept <= 1


def test_a_restored_state_ends_with_an_exception() -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught, STATES["unified"].restore():
        raise error
    assert caught.value is error
    assert capture() == STATES["outside"]


def test_one_restorer_may_be_entered_while_it_is_open_and_by_several_threads() -> None:
    restorer, step = STATES["unified"].restore(), threading.Barrier(2, timeout=20)

    def use(number: int) -> list[Any]:
        with autocast("cpu", enabled=bool(number), dtype=torch.bfloat16), restorer:
            step.wait()
            with restorer:
                found = [softmax()]
                step.wait()
            found.append(softmax())
        step.wait()
        return [*found, softmax()]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(use, range(2)))
    assert found == [[IN_FORCE["unified"], IN_FORCE["unified"], (FULL, FULL)]] * 2


def test_leaving_what_was_not_entered_is_an_error() -> None:
    with pytest.raises(RegionError) as caught:
        STATES["plain"].restore().__exit__(None, None, None)
    assert str(caught.value) == (
        "AutocastState.restore().__exit__() was called in a thread that has not entered it; use it in a `with` statement, "
        "or call __enter__() and __exit__() in pairs in one thread."
    )
    assert nesting() == 0


@pytest.mark.parametrize("name", STATES)
def test_an_observer_sees_what_runs_in_a_restored_state(name: str) -> None:
    with observe("cpu") as seen:
        with autocast("cpu", policy="fp32"), STATES[name].restore():
            assert softmax() == IN_FORCE[name]
        assert len(seen.calls) == sum(
            (STATES[name].devices[0].enabled, name in {"unified", "nested"}),
        )
    assert capture() == STATES["outside"]


class Deep(torch.autograd.Function):
    """A function whose backward runs a backward, down to a depth at which autograd moves on to another thread."""

    seen: list[Any] = []

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth == 0:
            found: list[Any] = [threading.get_ident(), active_policy("cpu").name, capture().devices[0].policy.name]
            with STATES["plain"].restore():
                with autocast("cpu", policy="unified"):
                    found.append(softmax())
                found.append(softmax())
            Deep.seen += [*found, active_policy("cpu").name]
        else:
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True)
                Deep.apply(inner, ctx.depth - 1).sum().backward()
        return grad, None


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this PyTorch cannot carry a policy safely")
def test_a_state_can_be_captured_and_restored_in_a_thread_of_autograds() -> None:
    Deep.seen.clear()
    with autocast("cpu", policy="fp32"):
        Deep.apply(torch.ones(1, requires_grad=True), 70).sum().backward()
    thread, *found = Deep.seen
    assert thread != threading.get_ident(), "autograd did not change threads, so this shows nothing"
    assert found == ["fp32", "fp32", (torch.float16, FULL), IN_FORCE["plain"], "fp32"]
