"""Optimizers and scripts that do more than PyTorch's own: they and the model see one set of weights and gradients."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import PreparationError
from mezzo.torch import autocast, float32_state_dict, master_params, prepare, refresh_model, unprepare
from mezzo.torch.masters.params import masters_in

MODES: list[dict[str, Any]] = [
    {},
    {"rounding": "stochastic"},
    {"masters": "kahan"},
    {"masters": False, "rounding": "stochastic"},
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


def loss_of(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    with autocast("cpu", dtype=torch.bfloat16):
        loss: Tensor = model(torch.randn(32, 8)).float().square().mean()
    return loss


def closure_for(model: nn.Module) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    return closure


def both(run: Callable[[nn.Module, torch.optim.Optimizer], list[float]], make: Any, **options: Any) -> tuple[Any, Any]:
    """Run on float32 weights under autocast, and on a prepared model."""
    plain = net()
    expected = run(plain, make(plain.parameters()))
    model = net()
    optimizer = make(model.parameters())
    prepare(model, optimizer, **options)
    return run(model, optimizer), expected


def perturb_(parameters: list[Tensor]) -> list[Tensor]:
    """Move weights a little against their gradients' direction, as SAM does; give the old ones."""
    old = [one.detach().clone() for one in parameters]
    with torch.no_grad():
        for one in parameters:
            if one.grad is not None:
                one.add_(one.grad.float(), alpha=0.5)
    return old


def restore_(parameters: list[Tensor], old: list[Tensor]) -> None:
    with torch.no_grad():
        for one, before in zip(parameters, old, strict=True):
            one.copy_(before)


def test_the_model_is_evaluated_with_masters_that_were_moved_between_steps() -> None:
    def sam(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(4):
            first = loss_of(model)
            first.backward()
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            old = perturb_(parameters)
            optimizer.zero_grad()
            second = loss_of(model)
            second.backward()
            restore_(parameters, old)
            optimizer.step()
            optimizer.zero_grad()
            losses += [first.item(), second.item()]
        return losses

    got, expected = both(sam, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert got == expected
    assert expected[0] != expected[1]


class Sam(torch.optim.Optimizer):
    """Perturbs within its step, and lets another optimizer over the same parameters step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD([one for group in self.param_groups for one in group["params"]], lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        parameters = [one for group in self.param_groups for one in group["params"]]
        with torch.enable_grad():
            loss = closure()
        old = perturb_(parameters)
        with torch.enable_grad():
            closure()
        restore_(parameters, old)
        self.base.step()
        return loss


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_step_within_a_step_goes_on_with_the_values_of_the_outer_one(options: dict[str, Any]) -> None:
    def run(model: nn.Module, optimizer: Any) -> list[float]:
        return [optimizer.step(closure_for(model)).item() for _ in range(4)]

    plain = net()
    expected = run(plain, Sam(plain.parameters()))
    model = net()
    optimizer = Sam(model.parameters())
    prepare(model, [optimizer, optimizer.base], **options)
    # Masters that are kept: the same numbers. Otherwise rounding of the weights, 2^-9 of each, is in the losses.
    exact = not options
    torch.testing.assert_close(run(model, optimizer), expected, rtol=0 if exact else 2e-2, atol=0)


class Centralized(torch.optim.SGD):
    """Puts another gradient in the place of each."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None and one.dim() > 1:
                    one.grad = one.grad - one.grad.mean(1, keepdim=True)
        return super().step(closure)


class Unwilling(torch.optim.SGD):
    """Steps without the gradients of its first parameters."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].grad = None
        return super().step(closure)


@pytest.mark.parametrize("kind", [Centralized, Unwilling])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_a_gradient_that_is_assigned_within_a_step_counts(kind: Any, grad_dtype: torch.dtype | None) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(3):
            losses.append(closure_for(model)().item())
            optimizer.step()
        return losses

    got, expected = both(run, lambda parameters: kind(parameters, lr=0.1), grad_dtype=grad_dtype)
    assert got == expected


class Renamed(torch.optim.SGD):
    """Calls its closure by another name, and more than once."""

    def step(self, rate: Any = None, evaluate: Any = None) -> Any:
        evaluate()
        super().step()
        return evaluate()


@pytest.mark.parametrize("by", ["place", "name"])
def test_a_closure_of_another_name_sees_the_weights_of_the_moment(by: str) -> None:
    def run(model: nn.Module, optimizer: Any) -> list[float]:
        closure = closure_for(model)
        steps = [optimizer.step(None, closure) if by == "place" else optimizer.step(evaluate=closure) for _ in range(3)]
        return [one.item() for one in steps]

    got, expected = both(run, lambda parameters: Renamed(parameters, lr=0.1))
    assert got == expected


class ByData(torch.optim.SGD):
    """Moves weights through ``data``, which leaves no trace, and evaluates again."""

    def step(self, closure: Any = None) -> Any:
        closure()
        for group in self.param_groups:
            for one in group["params"]:
                one.data.add_(one.grad.float(), alpha=-0.1)
        return closure()


def test_weights_that_are_moved_by_data_within_a_step_are_evaluated() -> None:
    def run(model: nn.Module, optimizer: Any) -> list[float]:
        return [optimizer.step(closure_for(model)).item() for _ in range(3)]

    got, expected = both(run, lambda parameters: ByData(parameters, lr=0.1))
    assert got == expected


def test_refreshing_brings_the_model_to_masters_that_were_written_by_data() -> None:
    model = net()
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for one in master_params(optimizer):
        one.data.fill_(0.5)
    assert not torch.equal(model[0].weight, torch.full_like(model[0].weight, 0.5))
    refresh_model(optimizer)
    assert all(torch.equal(one, torch.full_like(one, 0.5)) for one in model.parameters())


@pytest.mark.parametrize("what", ["weights", "checkpoint", "undone", "copied"])
def test_a_write_by_data_is_in_what_is_taken_out(what: str) -> None:
    model = net()
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    closure_for(model)()
    optimizer.step()
    model[0].weight.data.clamp_(-0.125, 0.125)
    if what == "weights":
        got = float32_state_dict(model)["0.weight"]
    elif what == "checkpoint":
        got = optimizer.state_dict()["mezzo"]["masters"][0]
    elif what == "copied":
        got = masters_in(copy.deepcopy((model, optimizer))[1])[0].values()
    else:
        unprepare(model, optimizer)
        got = model[0].weight.detach()
    assert got.abs().max() == 0.125


def test_what_is_written_on_a_parameter_is_there_on_its_master() -> None:
    model = net()
    model[0].weight.no_decay = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer)
    first, second = optimizer.param_groups[0]["params"][:2]
    assert first.no_decay is True
    assert not hasattr(second, "no_decay")


def test_another_thread_that_reads_gradients_does_not_disturb_a_step() -> None:
    model = net()
    seen = []

    class Read(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            thread = threading.Thread(target=lambda: seen.append(self.param_groups[0]["params"][0].grad.dtype))
            thread.start()
            thread.join()
            seen.append(self.param_groups[0]["params"][0].grad.dtype)
            return super().step(closure)

    optimizer = Read(model.parameters(), lr=0.1)
    prepare(model, optimizer)
    closure_for(model)()
    optimizer.step()
    assert seen == [torch.bfloat16, torch.float32]


def test_weights_that_were_prepared_in_inference_mode_can_be_trained() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode():
        prepare(model, optimizer)
    closure_for(model)()
    optimizer.step()
    assert not any(one.is_inference() for one in model.parameters())


class Wrapper(torch.optim.Optimizer):
    """Has an optimizer, and is none."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state


def test_a_wrapper_that_is_no_optimizer_of_its_own_is_refused_and_nothing_changes() -> None:
    model = net()
    wrapper = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        PreparationError, match=r"Wrapper does not call torch.optim.Optimizer.__init__.*prepare that one"
    ):
        prepare(model, wrapper)
    assert {one.dtype for one in model.parameters()} == {torch.float32}


def test_a_module_that_was_wrapped_since_is_undone_too() -> None:
    model = prepare(net())
    model[0] = nn.Sequential(model[0])
    unprepare(model)
    assert {one.dtype for one in model.parameters()} == {torch.float32}


def test_kahan_keeps_its_compensation_when_the_model_loads_what_it_has() -> None:
    model = net()
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), masters="kahan")
    closure_for(model)()
    optimizer.step()
    before = float32_state_dict(model)
    model.load_state_dict(model.state_dict())
    after = float32_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic"}], ids=str)
def test_what_was_written_to_a_master_is_in_what_is_taken_out(options: dict[str, Any]) -> None:
    model = net()
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    closure_for(model)()
    optimizer.step()
    first = masters_in(optimizer)[0]
    with torch.no_grad():
        first.fill_(0.3)  # between two bfloat16 numbers
    assert torch.equal(float32_state_dict(model)["0.weight"], torch.full((16, 8), 0.3))
    assert torch.equal(optimizer.state_dict()["mezzo"]["masters"][0], torch.full((16, 8), 0.3))


class FailsOnce(torch.optim.SGD):
    """Raises after its first step was made, before anybody hears of it."""

    failed = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if not self.failed:
            self.failed = True
            msg = "too late"
            raise ValueError(msg)


@pytest.mark.parametrize("fused", [False, True])
def test_after_a_step_that_raised_the_model_is_evaluated_with_the_masters_as_it_left_them(fused: bool) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(3):
            losses.append(closure_for(model)().item())
            try:
                optimizer.step()
            except ValueError:
                optimizer.zero_grad()
                if masters_in(optimizer):
                    saved = optimizer.state_dict()["mezzo"]["masters"][0].clone()
                    assert torch.equal(saved, masters_in(optimizer)[0].values())
                    assert not torch.equal(saved, saved.bfloat16().float())
        return losses

    got, expected = both(run, lambda parameters: FailsOnce(parameters, lr=0.1, fused=fused))
    assert got == expected
