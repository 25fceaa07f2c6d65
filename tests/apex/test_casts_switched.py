"""Casts off for backward passes, steps and by the user, and on again, whatever raises in between."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import mezzo.torch
from mezzo.apex.amp import casts

switches = pytest.mark.parametrize("switch", [casts.without_casts, casts.disable_casts])
Switch = Callable[[], AbstractContextManager[None]]


def start() -> casts.Handle:
    return casts.start(["cpu"], torch.float16, {})


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@switches
def test_casts_are_off_inside_and_on_after(switch: Switch) -> None:
    start()
    with switch():
        assert product() is torch.float32
    assert product() is torch.float16


@switches
def test_it_nests_and_may_be_entered_again(switch: Switch) -> None:
    start()
    one = switch()
    with one, switch():
        with one:
            assert product() is torch.float32
        assert product() is torch.float32
    assert product() is torch.float16


@switches
def test_an_exception_turns_casts_on_again(switch: Switch) -> None:
    start()
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"), switch(), switch():
            raise ValueError("mine")
        assert product() is torch.float16


@switches
def test_without_o1_it_does_nothing(switch: Switch) -> None:
    with torch.autocast("cpu"), switch():
        assert product() is torch.bfloat16
    assert product() is torch.float32


def test_only_disable_casts_counts_as_inactive() -> None:
    assert not casts.casts_active()
    handle = start()
    with casts.without_casts():
        assert casts.casts_active()
        with casts.disable_casts():
            assert not casts.casts_active()
            assert not handle.is_active()
        assert casts.casts_active()
    assert handle.is_active()


@switches
def test_regions_inside_cast_by_their_own_and_leave_it_off(switch: Switch) -> None:
    start()
    with switch():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert product() is torch.bfloat16
        assert product() is torch.float32
    assert product() is torch.float16


@switches
def test_in_a_disabled_region_casts_stay_off_after(switch: Switch) -> None:
    start()
    with torch.autocast("cpu", enabled=False):
        with switch():
            assert product() is torch.float32
        assert product() is torch.float32
    assert product() is torch.float16


@switches
def test_a_watched_model_inside_stays_uncast(switch: Switch) -> None:
    net = nn.Linear(2, 2)
    casts.watch_model(net)
    start()
    with switch():
        assert net(torch.ones(1, 2)).dtype is torch.float32
    assert net(torch.ones(1, 2)).dtype is torch.float16


@switches
def test_o1_started_inside_is_on_after(switch: Switch) -> None:
    with switch():
        start()
        assert product() is torch.float32
    assert product() is torch.float16


@switches
def test_o1_stopped_inside_is_off_after(switch: Switch) -> None:
    start()
    with switch():
        casts.stop()
    assert product() is torch.float32


# disable_casts as a decorator


def test_a_decorated_function_runs_with_casts_off() -> None:
    @casts.disable_casts()
    def plain(depth: int) -> list[torch.dtype]:
        """Docs."""
        return [product(), *(plain(depth - 1) if depth else [])]

    assert (plain.__name__, plain.__doc__, plain(0)) == ("plain", "Docs.", [torch.float32])
    start()
    assert plain(2) == [torch.float32] * 3
    assert product() is torch.float16


def test_a_decorated_generator_leaves_its_consumer_alone() -> None:
    @casts.disable_casts()
    def steps() -> Iterator[torch.dtype]:
        yield product()
        yield product()

    start()
    assert [(inside, product()) for inside in steps()] == [(torch.float32, torch.float16)] * 2


def test_a_decorated_coroutine_leaves_other_tasks_alone() -> None:
    @casts.disable_casts()
    async def plain() -> list[torch.dtype]:
        seen = [product()]
        await asyncio.sleep(0)
        return [*seen, product()]

    async def other() -> torch.dtype:
        return product()

    async def both() -> list[object]:
        return await asyncio.gather(plain(), other())

    start()
    assert asyncio.run(both()) == [[torch.float32] * 2, torch.float16]


# with_casts, for closures


def test_a_closure_in_a_step_is_cast() -> None:
    start()
    with casts.without_casts(), casts.without_casts():
        with casts.with_casts():
            assert product() is torch.float16
            with casts.without_casts():
                assert product() is torch.float32
            assert product() is torch.float16
        assert product() is torch.float32
    assert product() is torch.float16


def test_a_closure_is_not_cast_where_the_user_has_disabled_casts() -> None:
    start()
    with casts.disable_casts(), casts.without_casts(), casts.with_casts():
        assert product() is torch.float32
    with torch.autocast("cpu", enabled=False), casts.without_casts(), casts.with_casts():
        assert product() is torch.float32
    assert product() is torch.float16


def test_a_closure_that_raises_leaves_the_step_uncast() -> None:
    start()
    with casts.without_casts():
        with pytest.raises(ValueError, match="mine"), casts.with_casts():
            raise ValueError("mine")
        assert product() is torch.float32
    assert product() is torch.float16


def test_with_casts_alone_changes_nothing() -> None:
    with casts.with_casts():
        assert product() is torch.float32
    start()
    with casts.with_casts():
        assert product() is torch.float16
    assert product() is torch.float16


# Steps that raise


def step(inside: Callable[[], object]) -> torch.dtype:
    """Run a step as hooks of an optimizer see it: no hook runs if it raises."""
    frame = sys._getframe()
    casts.off_during(frame)
    inside()
    dtype = product()
    casts.on_after(frame)
    return dtype


def fail() -> None:
    raise ValueError("mine")


def test_a_step_runs_with_casts_off() -> None:
    start()
    assert step(lambda: None) is torch.float32
    assert product() is torch.float16
    assert step(lambda: step(lambda: None)) is torch.float32
    assert product() is torch.float16


def entries() -> dict[str, Callable[[], object]]:
    net = nn.Linear(2, 2)
    casts.watch_model(net)
    return {
        "ensure_here": casts.ensure_here,
        "forward": lambda: net(torch.ones(1, 2)),
        "step": lambda: step(lambda: None),
    }


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("entry", ["ensure_here", "forward", "step"])
def test_after_a_step_that_raised_casts_are_on_again(entry: str, deep: bool) -> None:
    again = entries()[entry]
    start()
    with pytest.raises(ValueError, match="mine"):
        step((lambda: step(fail)) if deep else fail)
    again()
    assert product() is torch.float16


@switches
def test_a_block_after_a_step_that_raised_puts_casts_on(switch: Switch) -> None:
    start()
    with pytest.raises(ValueError, match="mine"):
        step(fail)
    with switch():
        assert product() is torch.float32
    assert product() is torch.float16


@switches
def test_a_step_that_raised_in_a_block_leaves_the_block_uncast(switch: Switch) -> None:
    start()
    with switch():
        with pytest.raises(ValueError, match="mine"):
            step(fail)
        casts.ensure_here()
        assert product() is torch.float32
    assert product() is torch.float16


def test_a_step_that_raised_in_a_region_that_has_ended_changes_nothing_after() -> None:
    start()
    with pytest.raises(ValueError, match="mine"), torch.autocast("cpu", enabled=False):
        step(fail)
    casts.ensure_here()
    assert product() is torch.float16


def test_a_region_opened_after_a_step_that_raised_is_as_it_says() -> None:
    start()
    with pytest.raises(ValueError, match="mine"):
        step(fail)
    with torch.autocast("cpu", enabled=False):
        casts.ensure_here()
        assert product() is torch.float32
    casts.ensure_here()
    assert product() is torch.float16


def test_a_step_that_runs_is_not_taken_for_one_that_raised() -> None:
    net = nn.Linear(2, 2)
    casts.watch_model(net)
    start()
    seen: list[torch.dtype] = []
    step(lambda: seen.append(net(torch.ones(1, 2)).dtype))
    assert seen == [torch.float32]


def test_a_closure_of_a_step_calls_a_watched_model_with_casts() -> None:
    net = nn.Linear(2, 2)
    casts.watch_model(net)
    start()

    def closure() -> None:
        with casts.with_casts():
            assert net(torch.ones(1, 2)).dtype is torch.float16

    assert step(closure) is torch.float32


def test_the_next_step_starts_right_after_one_that_raised_with_mezzos_own_region_around() -> None:
    start()
    with mezzo.torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match="mine"):
            step(fail)
        assert step(lambda: None) is torch.float32
        assert product() is torch.bfloat16
    assert product() is torch.float16


def test_disable_casts_of_a_generator_may_end_before_one_that_began_later() -> None:
    casts.start(["cpu"], torch.bfloat16, {})
    product = torch.ones(1, 1)

    def steps() -> Iterator[None]:
        with casts.disable_casts():
            yield

    generator = steps()
    next(generator)
    with casts.disable_casts():
        assert next(generator, "ended") == "ended"
        assert (product @ product).dtype is torch.float32
        with casts.without_casts():
            assert (product @ product).dtype is torch.float32
        assert (product @ product).dtype is torch.float32
    assert (product @ product).dtype is torch.bfloat16
