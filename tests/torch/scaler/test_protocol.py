"""The protocol of `torch.amp.GradScaler`: its stages and their errors, its numbers, and what its subclasses rely on."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo import MezzoError, ScalerProtocolError, ScalingError
from mezzo.torch import GradScaler

from .runs import INF, each_class, each_loop, make_optimizer, make_scaler

NO_SCALE = (
    "Attempted {} but _scale is None.  This may indicate your script did not use scaler.scale(loss or outputs) "
    "earlier in the iteration."
)
AFTER_STEP = {
    "step": "step() has already been called since the last update().",
    "unscale_": "unscale_() is being called after step().",
}
NEW_SCALE = (
    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with requires_grad=False."
)


class Bench:
    """One weight of two elements, at zero, its optimizer with learning rate 1, and a scaler that starts at 1024."""

    def __init__(self, scaler: Any, loop: str = "for-loop") -> None:
        self.weight = nn.Parameter(torch.zeros(2))
        self.optimizer = make_optimizer("sgd", loop, [self.weight])
        self.optimizer.param_groups[0].update(lr=1.0, momentum=0.0)
        self.scaler = scaler

    def backward(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale((self.weight * factor).sum()).backward()

    def iterate(self, factor: float = 1.0) -> float:
        self.backward(factor)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.weight[0].item()


def bench(scaler_class: type = GradScaler, loop: str = "for-loop", **numbers: Any) -> Bench:
    return Bench(make_scaler(scaler_class, **{"init_scale": 1024.0, **numbers}), loop)


def test_it_is_accepted_where_code_checks_for_the_scaler_of_pytorch() -> None:
    assert issubclass(GradScaler, torch.amp.GradScaler)
    assert isinstance(GradScaler("cpu"), torch.GradScaler)


# Misuse without meaning


@each_class
@pytest.mark.parametrize("name", ["unscale_", "step", "update"])
def test_anything_before_the_first_scale_is_refused(scaler_class: type, name: str) -> None:
    one = bench(scaler_class)
    one.weight.sum().backward()
    arguments = () if name == "update" else (one.optimizer,)
    with pytest.raises(AssertionError) as caught:
        getattr(one.scaler, name)(*arguments)
    assert str(caught.value).startswith(NO_SCALE.format(name))
    assert isinstance(caught.value, MezzoError) is (scaler_class is GradScaler)
    assert one.weight.tolist() == [0.0, 0.0]
    assert one.iterate() == -1.0


@each_class
def test_a_new_scale_before_the_first_scale_is_refused(scaler_class: type) -> None:
    one = bench(scaler_class)
    with pytest.raises(AssertionError) as caught:
        one.scaler.update(2.0)
    assert str(caught.value).startswith(NO_SCALE.format("update"))
    assert one.scaler.get_scale() == 1024.0


@each_class
@each_loop
@pytest.mark.parametrize("factor", [1.0, INF], ids=["stepped", "skipped"])
@pytest.mark.parametrize("name", AFTER_STEP)
def test_a_call_after_step_is_refused(scaler_class: type, loop: str, factor: float, name: str) -> None:
    one = bench(scaler_class, loop)
    one.backward(factor)
    one.scaler.step(one.optimizer)
    before, grad = one.weight.tolist(), one.weight.grad.clone()
    with pytest.raises(RuntimeError) as caught:
        getattr(one.scaler, name)(one.optimizer)
    assert str(caught.value).startswith(AFTER_STEP[name])
    assert isinstance(caught.value, ScalerProtocolError) is (scaler_class is GradScaler)
    assert one.weight.tolist() == before
    torch.testing.assert_close(one.weight.grad, grad, rtol=0, atol=0, equal_nan=True)
    one.scaler.update()
    assert one.scaler.get_scale() == (1024.0 if factor == 1.0 else 512.0)
    assert one.iterate() == before[0] - 1.0


@each_class
@pytest.mark.parametrize("loss", [3, 2.5, None, [1.0], (None,), [torch.ones(()), 1]], ids=repr)
def test_a_loss_that_is_no_tensor_is_refused(scaler_class: type, loss: Any) -> None:
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        make_scaler(scaler_class).scale(loss)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so the scaler is not disabled")
@each_class
def test_cuda_without_a_device_is_disabled_with_the_warning_of_pytorch(scaler_class: type) -> None:
    text = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
    with pytest.warns(UserWarning, match="Disabling") as record:
        scaler = scaler_class()
    assert [str(warning.message) for warning in record] == [text]
    assert record[0].filename == __file__
    assert not scaler.is_enabled()
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler_class("cuda", enabled=False)


# The stages


@each_class
def test_update_starts_a_new_iteration_for_all_optimizers(scaler_class: type) -> None:
    one = bench(scaler_class)
    other = Bench(one.scaler)
    for expected in (-1.0, -2.0):
        one.backward()
        other.backward()
        one.scaler.unscale_(one.optimizer)
        one.scaler.step(one.optimizer)
        one.scaler.step(other.optimizer)
        one.scaler.update()
        assert (one.weight[0].item(), other.weight[0].item()) == (expected, expected)


@each_class
def test_update_after_unscale_without_step_counts_what_was_found(scaler_class: type) -> None:
    one = bench(scaler_class)
    one.backward(INF)
    one.scaler.unscale_(one.optimizer)
    one.scaler.update()
    assert one.scaler.get_scale() == 512.0
    assert one.iterate() == -1.0


@each_class
@pytest.mark.parametrize("factor", [1.0, INF], ids=["finite", "inf"])
def test_what_was_found_can_be_read_where_others_read_it(scaler_class: type, factor: float) -> None:
    one = bench(scaler_class)
    one.backward(factor)
    one.scaler.unscale_(one.optimizer)
    found = one.scaler._found_inf_per_device(one.optimizer)
    assert {device.type: value.item() for device, value in found.items()} == {"cpu": float(factor == INF)}
    assert one.scaler._per_optimizer_states[id(one.optimizer)]["found_inf_per_device"] is found
    assert one.scaler._per_optimizer_states[id(one.optimizer)]["stage"] is torch.amp.grad_scaler.OptState.UNSCALED


@each_class
def test_check_inf_looks_and_does_not_touch(scaler_class: type) -> None:
    one = bench(scaler_class)
    one.backward()
    found = one.scaler._check_inf_per_device(one.optimizer)
    assert [value.item() for value in found.values()] == [0.0]
    assert one.weight.grad.tolist() == [1024.0, 1024.0]


# The numbers


@each_class
def test_each_number_can_be_read_and_set(scaler_class: type) -> None:
    one = bench(scaler_class, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    scaler = one.scaler
    numbers = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    assert numbers == (4.0, 0.25, 3)
    scaler.set_growth_factor(8.0)
    scaler.set_backoff_factor(0.5)
    scaler.set_growth_interval(2)
    numbers = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    assert numbers == (8.0, 0.5, 2)
    trace = []
    for factor in (1.0, 1.0, INF, 1.0):
        one.iterate(factor)
        trace.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert trace == [(1024.0, 1), (8192.0, 0), (4096.0, 0), (4096.0, 1)]


@each_class
@pytest.mark.parametrize("how", ["set", "load", "construct"])
def test_an_interval_that_is_never_reached(scaler_class: type, how: str) -> None:
    never = 2**62
    one = bench(scaler_class, growth_interval=never if how == "construct" else 2)
    one.iterate()
    if how == "set":
        one.scaler.set_growth_interval(never)
    if how == "load":
        one.scaler.load_state_dict({**one.scaler.state_dict(), "growth_interval": never})
    for _ in range(4):
        one.iterate()
    assert (one.scaler.get_scale(), one.scaler._get_growth_tracker()) == (1024.0, 5)


def test_a_shorter_interval_grows_a_scale_whose_tracker_is_beyond_it() -> None:
    one = bench(growth_interval=100)
    for _ in range(5):
        one.iterate()
    one.scaler.set_growth_interval(3)
    one.iterate()
    assert (one.scaler.get_scale(), one.scaler._get_growth_tracker()) == (2048.0, 0)


@each_class
def test_the_scale_is_there_before_any_tensor_was_scaled(scaler_class: type) -> None:
    scaler = make_scaler(scaler_class, init_scale=128.0)
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler._scale) == (128.0, 0, None)
    scaler.scale(torch.ones(()))
    assert (scaler._scale.dtype, scaler._growth_tracker.dtype) == (torch.float32, torch.int32)
    assert (scaler._scale.shape, scaler._growth_tracker.shape) == ((), ())


FOUR: dict[str, Callable[[], Any]] = {
    "float": lambda: 4.0,
    "tensor": lambda: torch.tensor(4.0),
    "float64 tensor": lambda: torch.tensor(4.0, dtype=torch.float64),
    "float16 tensor": lambda: torch.tensor(4.0, dtype=torch.float16),
}


@each_class
@pytest.mark.parametrize("make", FOUR.values(), ids=FOUR.keys())
def test_a_new_scale_is_taken_and_the_tracker_left(scaler_class: type, make: Callable[[], Any]) -> None:
    one, new_scale = bench(scaler_class), make()
    one.iterate()
    scale = one.scaler._scale
    one.scaler.update(new_scale)
    assert (one.scaler.get_scale(), one.scaler._get_growth_tracker()) == (4.0, 1)
    assert one.scaler._scale is scale
    if isinstance(new_scale, Tensor):
        new_scale.fill_(9.0)
        assert one.scaler.get_scale() == 4.0
    assert one.iterate() == -2.0


@pytest.mark.parametrize("new_scale", [4, torch.tensor([4.0]), torch.tensor([[4]]), torch.tensor(4)], ids=repr)
def test_a_new_scale_that_pytorch_stumbles_over_is_taken(new_scale: Any) -> None:
    one = bench()
    one.iterate()
    one.scaler.update(new_scale)
    assert one.scaler.get_scale() == 4.0
    assert one.iterate() == -2.0


@each_class
def test_a_new_scale_ends_the_iteration(scaler_class: type) -> None:
    one = bench(scaler_class)
    one.backward(INF)
    one.scaler.step(one.optimizer)
    one.scaler.update(64.0)
    assert one.scaler.get_scale() == 64.0
    assert one.iterate() == -1.0
    assert one.scaler.get_scale() == 64.0


WRONG_TENSORS = {
    "two elements": torch.ones(2),
    "none": torch.ones(0),
    "requires grad": torch.ones((), requires_grad=True),
    "elsewhere": torch.ones((), device="meta"),
}


@each_class
@pytest.mark.parametrize("new_scale", WRONG_TENSORS.values(), ids=WRONG_TENSORS.keys())
def test_a_new_scale_of_the_wrong_kind_is_refused(scaler_class: type, new_scale: Tensor) -> None:
    one = bench(scaler_class)
    one.iterate()
    with pytest.raises(AssertionError) as caught:
        one.scaler.update(new_scale)
    assert str(caught.value).startswith(NEW_SCALE)
    assert isinstance(caught.value, ScalingError) is (scaler_class is GradScaler)
    assert (one.scaler.get_scale(), one.scaler._get_growth_tracker()) == (1024.0, 1)


@pytest.mark.parametrize("new_scale", ["4", [4.0], True], ids=repr)
def test_a_new_scale_that_is_no_number_is_refused(new_scale: Any) -> None:
    one = bench()
    one.iterate()
    with pytest.raises(ScalingError, match=re.escape(repr(new_scale))):
        one.scaler.update(new_scale)
    assert one.scaler.get_scale() == 1024.0


# A disabled scaler


@each_class
def test_a_disabled_scaler_gets_out_of_the_way(scaler_class: type) -> None:
    one = Bench(make_scaler(scaler_class, enabled=False))
    outputs = [torch.ones(()), {"a": 3}]
    assert one.scaler.scale(outputs) is outputs
    one.scaler.unscale_(one.optimizer)
    one.scaler.update()
    one.scaler.update(3.0)
    assert (one.scaler.get_scale(), one.scaler._get_growth_tracker(), one.scaler.is_enabled()) == (1.0, 0, False)
    assert one.iterate() == -1.0
    assert one.iterate(INF) == -INF


@each_class
def test_a_disabled_scaler_takes_numbers_as_they_come(scaler_class: type) -> None:
    assert not scaler_class("cpu", growth_factor=0.5, backoff_factor=2.0, enabled=False).is_enabled()


@each_class
def test_a_disabled_scaler_calls_closures_as_the_optimizer_does(scaler_class: type) -> None:
    one = Bench(make_scaler(scaler_class, enabled=False))

    def closure() -> Tensor:
        one.optimizer.zero_grad()
        loss = one.weight.sum() + 5
        one.scaler.scale(loss).backward()
        return loss

    assert one.scaler.step(one.optimizer, closure=closure).item() == 5.0
    assert one.scaler.step(one.optimizer, closure).item() == 3.0
