"""Casts of weights that are kept for a region on a plugged-in device: made once, and never stale."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from standin_backend import calls
from torch import Tensor, nn

import mezzo.torch

NAME = "standin"
REGIONS = {"torch": torch.autocast, "mezzo": mezzo.torch.autocast}


@pytest.fixture(params=REGIONS.values(), ids=REGIONS)
def region(request: pytest.FixtureRequest) -> type[torch.autocast]:
    return request.param  # type: ignore[no-any-return]


def of_numbers(number: float) -> Tensor:
    return torch.full((2, 2), number, device=NAME)


def added_in_foreach(weight: nn.Parameter) -> None:
    torch._foreach_add_([weight], 1.0)


def stepped(weight: nn.Parameter) -> None:
    weight.grad = -torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()


def pointed_elsewhere(weight: nn.Parameter) -> None:
    weight.data = of_numbers(2.0)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "add_": lambda weight: weight.add_(1.0),
    "copy_": lambda weight: weight.copy_(torch.full((2, 2), 2.0)),
    "a view": lambda weight: weight.view(-1).fill_(2.0),
    "foreach": added_in_foreach,
    "an optimizer": stepped,
    "data": pointed_elsewhere,
    "set_": lambda weight: weight.set_(of_numbers(2.0)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_a_weight_that_changes_is_cast_again(
    region: type[torch.autocast], write: Callable[[nn.Parameter], object], is_frozen: bool
) -> None:
    weight, x = nn.Parameter(of_numbers(1.0), requires_grad=not is_frozen), of_numbers(1.0)
    with region(NAME), calls() as ran:
        for _ in range(3):
            before = torch.mm(x, weight)
        assert [call.op for call in ran].count("_to_copy") == 4  # three of x
        with torch.no_grad():
            write(weight)
        after = torch.mm(x, weight)
    assert before.tolist() == [[2, 2], [2, 2]]
    assert after.tolist() == [[4, 4], [4, 4]]


def test_casts_end_with_the_region_and_are_of_one_thread(region: type[torch.autocast]) -> None:
    weight, x = nn.Parameter(of_numbers(1.0)), of_numbers(1.0).half()

    def casts() -> int:
        with region(NAME), calls() as ran:
            torch.mm(x, weight)
            torch.mm(x, weight)
        return [call.op for call in ran].count("_to_copy")

    found = [casts(), casts()]
    thread = threading.Thread(target=lambda: found.append(casts()))
    with region(NAME):
        torch.mm(x, weight)
        thread.start()
        thread.join()
    assert found == [1, 1, 1]


def test_each_dtype_has_its_cast_and_gradients_add_up_in_float32(region: type[torch.autocast]) -> None:
    weight, x = nn.Parameter(of_numbers(1.0)), of_numbers(1.0)
    with region(NAME):
        half = torch.mm(x, weight)
        with region(NAME, dtype=torch.bfloat16):
            brain = torch.mm(x, weight)
        again = torch.mm(x, weight)
    assert (half.dtype, brain.dtype, again.dtype) == (torch.float16, torch.bfloat16, torch.float16)
    (half.sum() + brain.sum() + again.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    assert weight.grad.tolist() == [[6, 6], [6, 6]]


def test_a_cast_made_without_gradients_serves_training_too(region: type[torch.autocast]) -> None:
    weight, x = nn.Parameter(of_numbers(1.0)), of_numbers(1.0)
    with region(NAME):
        with torch.no_grad():
            torch.mm(x, weight)
        torch.mm(x, weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2, 2], [2, 2]]


def test_a_subclass_that_is_not_the_devices_own_is_cast_each_time(region: type[torch.autocast]) -> None:
    class Marked(type(of_numbers(1.0))):  # type: ignore[misc]
        pass

    weight = of_numbers(1.0).requires_grad_()
    weight.__class__ = Marked
    x = of_numbers(1.0).half()
    with region(NAME), calls() as ran:
        torch.mm(x, weight)
        torch.mm(x, weight)
    assert [call.op for call in ran].count("_to_copy") == 2
