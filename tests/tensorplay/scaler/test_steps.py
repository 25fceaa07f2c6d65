"""Steps with each kind of optimizer: made as without a scaler, or skipped without a trace."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorplay as tp

from .runs import OPTIMIZERS, bits, iterate, make, scaler_of, snapshot

FUSED = [name for name in OPTIMIZERS if name.startswith("fused")]
DIVIDE_THEMSELVES = ["fused SGD", "fused SGD momentum", "fused Adagrad"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_steps_are_the_steps_without_a_scaler(name: str) -> None:
    weight, optimizer = make(name)
    other, plain = make(name)
    scaler = scaler_of()
    for _ in range(4):
        iterate(scaler, optimizer, weight)
        plain.zero_grad()
        (other * other).sum().backward()
        plain.step()
    # A power of two scales and unscales exactly.
    assert bits(weight) == bits(other)
    assert bits(list(optimizer.state.values())) == bits(list(plain.state.values()))
    assert scaler.steps_taken(optimizer) == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_steps_of_other_dtypes_too(name: str, dtype: str) -> None:
    weight, optimizer = make(name, dtype=getattr(tp, dtype))
    other, plain = make(name, dtype=getattr(tp, dtype))
    scaler = scaler_of()
    for _ in range(2):
        iterate(scaler, optimizer, weight)
        plain.zero_grad()
        (other * other).sum().backward()
        plain.step()
    assert bits(weight) == bits(other)


@pytest.mark.parametrize("factor", [math.inf, math.nan], ids=["inf", "nan"])
@pytest.mark.parametrize("made_before", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_no_trace(name: str, made_before: int, factor: float) -> None:
    weight, optimizer = make(name)
    scaler = scaler_of()
    for _ in range(made_before):
        iterate(scaler, optimizer, weight)
    before = snapshot(optimizer)
    for _ in range(2):
        iterate(scaler, optimizer, weight, factor)
    assert snapshot(optimizer) == before
    assert scaler.get_scale() == 2.0**14
    assert not scaler.stepped(optimizer)


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_goes_on_after_a_first_step_that_was_skipped(name: str) -> None:
    weight, optimizer = make(name)
    other, plain = make(name)
    scaler = scaler_of()
    iterate(scaler, optimizer, weight, math.inf)
    for _ in range(3):
        iterate(scaler, optimizer, weight)
        plain.zero_grad()
        (other * other).sum().backward()
        plain.step()
    assert bits(weight) == bits(other)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


def test_a_fused_optimizer_divides_float16_gradients_in_float32() -> None:
    weight = tp.nn.Parameter(tp.tensor([1.0]).to(tp.float16))
    optimizer = tp.optim.SGD([weight], lr=2.0**26, fused=True)
    scaler = scaler_of(init_scale=2.0**12)
    scaler.scale(tp.ones(()))
    # Divided in float16 it would be 2**-26, which is 0 there.
    weight.grad = tp.tensor([2.0**-14]).to(tp.float16)
    scaler.step(optimizer)
    assert weight.tolist() == [0.0]


@pytest.mark.parametrize("name", DIVIDE_THEMSELVES)
def test_a_fused_optimizer_with_float16_inf_is_not_called(name: str) -> None:
    weight, optimizer = make(name, 1.0, dtype=tp.float16)
    before = snapshot(optimizer)
    scaler = scaler_of()
    scaler.scale(tp.ones(()))
    weight.grad = tp.tensor([math.inf]).to(tp.float16)
    scaler.step(optimizer)
    scaler.update()
    assert snapshot(optimizer) == before
    assert scaler.get_scale() == 2.0**15


class Contract(tp.optim.SGD):  # type: ignore[misc]
    """Divides and skips by itself, in Python."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self._step_supports_amp_scaling = True
        self.seen: list[Any] = []

    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        self.seen.append((self.grad_scale, self.found_inf.item(), grad_scaler))
        with tp.no_grad():
            for one in self.param_groups[0]["params"]:
                one.sub_(one.grad)


def test_an_optimizer_that_divides_itself_finds_what_it_looks_for() -> None:
    weight = tp.nn.Parameter(tp.tensor([1.0]))
    optimizer = Contract([weight])
    scaler = scaler_of()
    iterate(scaler, optimizer, weight)
    assert optimizer.seen == [(None, 0.0, None)]
    assert weight.tolist() == [-1.0]


def test_a_scale_that_the_user_has_set_on_the_optimizer_is_there_afterwards() -> None:
    weight = tp.nn.Parameter(tp.tensor([1.0]).to(tp.float16))
    optimizer = tp.optim.SGD([weight], lr=1.0, fused=True)
    optimizer.grad_scale = mine = tp.full((), 2.0)
    scaler = scaler_of(init_scale=4.0)
    scaler.scale(tp.ones(()))
    weight.grad = tp.tensor([8.0]).to(tp.float16)
    scaler.step(optimizer)
    assert optimizer.grad_scale is mine
    assert weight.tolist() == [0.0]


def test_a_wrapper_passes_on_what_the_optimizer_looks_for() -> None:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.__dict__["inner"] = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(self.inner, name, value)

        def __delattr__(self, name: str) -> None:
            delattr(self.inner, name)

    weight, optimizer = make("fused SGD", 1.0)
    scaler = scaler_of()
    iterate(scaler, Wrapper(optimizer), weight)
    assert weight.tolist() == [0.75]
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


def test_an_optimizer_that_raises_may_be_stepped_again() -> None:
    weight, optimizer = make("SGD", 1.0)
    scaler = scaler_of()
    scaler.scale((weight * weight).sum()).backward()
    with pytest.raises(TypeError):
        scaler.step(optimizer, nonsense=1)
    scaler.step(optimizer)
    assert weight.tolist() == [0.75]


def test_step_gives_what_the_optimizer_gives() -> None:
    class Telling(tp.optim.SGD):  # type: ignore[misc]
        def step(self, word: str) -> str:
            super().step()
            return f"made {word}"

    weight = tp.nn.Parameter(tp.tensor([1.0]))
    optimizer = Telling([weight], lr=0.5)
    scaler = scaler_of()
    scaler.scale((weight * weight).sum()).backward()
    assert scaler.step(optimizer, "it") == "made it"
    scaler.update()
    optimizer.zero_grad()
    scaler.scale((weight + math.inf).sum() * math.inf).backward()
    assert scaler.step(optimizer, word="it") is None


def test_a_scheduler_goes_with_the_scaler() -> None:
    weight, optimizer = make("SGD", 1.0)
    scheduler = tp.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = scaler_of()
    for _ in range(2):
        iterate(scaler, optimizer, weight)
        scheduler.step()
    assert scaler.steps_taken(optimizer) == 2
    assert optimizer.param_groups[0]["lr"] == 0.03125
