"""What an attack found: ops that must not run twice, tensors without memory, masks that are none, memory that is reused."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from mezzo.errors import OptionError
from mezzo.torch import GradScaler, autocast, explain, find_nonfinite
from mezzo.torch.recording.memory_places import place_of
from mezzo.torch.recording.module_stack import ModuleNames

CALLS: list[int] = []


@torch.library.custom_op("mezzo_test::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    """Counts its calls, and overflows."""
    CALLS.append(1)
    return x * 1e4 * torch.rand(()).add(1).half()


def test_an_op_that_is_not_pytorchs_is_never_run_again() -> None:
    CALLS.clear()
    torch.manual_seed(0)
    with find_nonfinite() as found:
        counted(torch.full((2,), 100.0).half())
    state = torch.get_rng_state()
    torch.manual_seed(0)
    torch.rand(())
    assert len(CALLS) == 1
    assert torch.equal(state, torch.get_rng_state())
    assert found.first is not None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own use in forward-mode AD
@pytest.mark.parametrize("watch", [find_nonfinite, lambda: explain(numerics=True), lambda: explain(shadow=True)])
def test_zeros_without_memory_are_no_trouble(watch: Callable[[], Any]) -> None:
    linear, x = nn.Linear(3, 4), torch.ones(3)
    expected = torch.func.jvp(lambda x: linear(x).sum(), (x,), (x,))
    with watch():
        got = torch.func.jvp(lambda x: linear(x).sum(), (x,), (x,))
        torch._efficientzerotensor((3, 3)) * 2
    assert torch.equal(got[1], expected[1])


class Wrapped(Tensor):
    """A wrapper whose ops give plain tensors."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(one.inner if isinstance(one, Wrapped) else one for one in args), **(kwargs or {}))


@pytest.mark.parametrize("call", [lambda w: torch.ones(4) / w, lambda w: torch.zeros(4) ** w])
def test_a_wrapper_that_goes_in_is_not_read(call: Callable[[Tensor], Tensor]) -> None:
    with find_nonfinite() as found:
        call(Wrapped(torch.zeros(4) - 0.0))
        torch.ones(2) / Wrapped(torch.zeros(2))
    assert found.first is not None
    assert found.first.op == "aten::div"


def cast_one() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x[3, 5] = -2e5
    x.half()


MISSED: dict[str, Callable[[], object]] = {
    "one number below the range": cast_one,
    "a sum": lambda: torch.tensor([-4e4, 1.0]).half() + torch.tensor([-4e4, 1.0]).half(),
    "a product": lambda: torch.tensor([300.0, 1.0]).half() * torch.tensor([-300.0, 1.0]).half(),
    "0 times -inf": lambda: (1 - torch.tensor([1.0, 0.0])) * -torch.inf,
    "a product with a large negative number": lambda: torch.tensor([-1e9, 1.0]) * torch.tensor([1e35, 1.0]),
    "inf - inf": lambda: torch.full((2,), torch.inf) - torch.inf,
}


@pytest.mark.parametrize("call", MISSED.values(), ids=MISSED)
def test_what_looks_like_a_mask_and_is_none_is_found(call: Callable[[], object]) -> None:
    with find_nonfinite() as found:
        call()
    assert found.first is not None
    assert found.first.source is not None


def in_place() -> None:
    logits = torch.zeros(4, 6)
    logits[:, 3] = -torch.inf
    logits[:, 4] = -1e4
    logits /= 0.7


def in_parts() -> None:
    bias = torch.full((4, 4), -torch.inf)
    bias[:, 0] = 0
    bias.add_(1)


def largest_first() -> None:
    distance = torch.full((6,), torch.inf)
    distance[0] = 0
    torch.minimum(distance, distance + 1)


MASKS: dict[str, Callable[[], object]] = {"in place": in_place, "in parts": in_parts, "Inf": largest_first}


@pytest.mark.parametrize("call", MASKS.values(), ids=MASKS)
def test_masks_that_are_worked_on_in_place_stay_masks(call: Callable[[], object]) -> None:
    with find_nonfinite() as found:
        call()
    assert found.first is None, str(found)


def test_a_mask_made_before_and_changed_in_place_stays_one() -> None:
    mask = torch.full((4, 4), -torch.inf).triu(1)
    with find_nonfinite() as found:
        mask += 1
    assert found.first is None, str(found)


def test_nan_data_that_is_changed_in_place_came_in() -> None:
    x = torch.tensor([1.0, torch.nan])
    with find_nonfinite() as found:
        x.mul_(2)
    assert found.first is not None
    assert (found.first.op, found.first.cause_kind) == ("aten::mul_", "came in")


def test_what_is_known_of_memory_ends_with_it() -> None:
    with find_nonfinite() as found:
        for size in range(1, 200):
            mask = torch.full((size,), -torch.inf)
            del mask
            x = torch.tensor([torch.nan] * size)
            x * 2
            if found.first is None:
                break
    assert found.first is not None
    assert found.first.cause_kind == "came in"


def test_memory_that_was_never_written_is_not_blamed() -> None:
    with find_nonfinite() as found:
        for _ in range(50):
            x = torch.empty(64)
            x[:32] = 1.0
            x[:32] * 2
    assert found.first is None


def test_nested_tensors_are_looked_into_or_told() -> None:
    with find_nonfinite() as found:
        parts = [torch.full((2, 2), 6e4).half(), torch.full((3, 2), 6e4).half()]
        torch.nested.nested_tensor(parts, layout=torch.jagged) * 2
    assert found.first is not None or any("cannot be looked at" in note for note in found.report.notes)


def test_blocks_may_end_in_another_order_than_they_began() -> None:
    class Users(TorchDispatchMode):
        ops = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops += 1
            return func(*args, **(kwargs or {}))

    first, users, second = explain(), Users(), find_nonfinite()
    first.__enter__()
    users.__enter__()
    second.__enter__()
    torch.ones(2)
    first.__exit__(None, None, None)
    torch.ones(2)
    second.__exit__(None, None, None)
    torch.ones(2)
    users.__exit__(None, None, None)
    assert len(first.report.records) == 1
    assert second.report.ops == 2
    assert users.ops == 3
    assert not is_in_torch_dispatch_mode()


def test_a_block_is_left_in_the_thread_that_entered_it() -> None:
    explained = explain()
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            explained.__exit__(None, None, None)
        except OptionError as error:
            errors.append(error)

    with explained:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        torch.ones(2).relu()
    assert "this explain block was entered in another thread" in str(errors[0])
    assert [record.op for record in explained.report.records] == ["aten::ones", "aten::relu"]


def test_a_watch_that_was_left_open_ends_with_its_scaler() -> None:
    net = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), GradScaler("cpu", 4.0, on_overflow="explain")
    with autocast("cpu", dtype=torch.float16):
        loss = net(torch.full((1, 2), 1e30)).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch._C._len_torch_dispatch_stack() == 1
    del scaler
    gc.collect()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_parameters_that_share_their_storage_keep_their_names() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(net.parameters()).detach(), net.parameters())
    with torch.no_grad():
        net[0].weight[0, 0] = torch.nan
    with find_nonfinite(net) as found:
        net(torch.ones(1, 2))
    assert found.first is not None
    assert found.first.cause == "the parameter 0.weight has NaN already"


def test_memory_of_a_parameter_that_is_gone_has_no_name() -> None:
    names, model = ModuleNames(), nn.Linear(4, 4)
    names.add(model)
    place = place_of(model.weight)
    assert names.parameter_at(place) == "weight"
    del model
    gc.collect()
    assert names.parameter_at(place) is None, "it may be the memory of anything by now"


def test_nan_that_the_program_writes_is_meant_and_so_is_what_comes_of_it() -> None:
    with find_nonfinite() as found:
        torch.full((2,), torch.nan) + 1
    assert found.first is None


def test_nothing_is_watched_inside_of_a_block_with_another_mode() -> None:
    class Users(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    net = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), GradScaler("cpu", 4.0, on_overflow="explain")
    with Users():
        with autocast("cpu", dtype=torch.float16):
            loss = net(torch.full((1, 2), 1e30)).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch._C._len_torch_dispatch_stack() == 1
    assert torch._C._len_torch_dispatch_stack() == 0
