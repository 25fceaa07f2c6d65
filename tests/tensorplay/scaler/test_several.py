"""Several optimizers, several losses, several backward passes, one scaler; and losses in containers."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import tensorplay as tp

from mezzo.errors import ScalerProtocolError, ScalingError

from .runs import make, parameter, scaler_of


def test_one_overflow_stops_one_optimizer_and_lowers_the_scale_of_all() -> None:
    weight, optimizer = make("SGD")
    other, second = make("Adam")
    scaler = scaler_of()
    scaler.scale((weight * weight).sum()).backward()
    scaler.scale((other * other).sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.step(second)
    scaler.update()
    assert weight.tolist() == [0.75, -1.5, 2.25]
    assert other.tolist() == [1.0, -2.0, 3.0]
    assert (scaler.stepped(optimizer), scaler.stepped(second)) == (True, False)
    assert scaler.get_scale() == 2.0**15


def test_nan_of_one_and_inf_of_another_are_inf() -> None:
    scaler = scaler_of(max_nan_backoffs=0)
    for factors, expected in (((math.nan, math.nan), 2.0**16), ((math.nan, math.inf), 2.0**15)):
        for factor in factors:
            weight, optimizer = make("SGD")
            scaler.scale((weight * weight).sum() * factor).backward()
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected


def test_nan_of_one_parameter_and_inf_of_another_are_inf() -> None:
    weight, other = parameter(1.0), parameter(1.0)
    optimizer = tp.optim.SGD([weight, other], lr=0.125)
    scaler = scaler_of(max_nan_backoffs=0)
    scaler.scale(weight.sum() * math.nan + other.sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15


def test_several_losses_of_one_graph() -> None:
    weight, optimizer = make("SGD", 1.0, 2.0)
    scaler = scaler_of()
    hidden = weight * 2
    first, second = scaler.scale([hidden.sum(), (hidden * hidden).sum()])
    (first + second).backward()
    scaler.step(optimizer)
    # The gradient is 2 + 8 w, the rate 1/8.
    assert weight.tolist() == [1.0 - 10 / 8, 2.0 - 18 / 8]


def test_gradients_accumulate_over_micro_batches() -> None:
    weight, optimizer = make("SGD", 1.0)
    other, plain = make("SGD", 1.0)
    scaler = scaler_of()
    for _ in range(3):
        for part in (1.0, 2.0, 3.0, 4.0):
            scaler.scale((weight * weight).sum() * part / 4).backward()
            ((other * other).sum() * part / 4).backward()
        scaler.unscale_(optimizer)
        assert weight.grad.tolist() == other.grad.tolist()
        scaler.step(optimizer)
        plain.step()
        scaler.update()
        optimizer.zero_grad()
        plain.zero_grad()
    assert weight.tolist() == other.tolist()
    assert scaler._get_growth_tracker() == 3


def test_parameters_of_two_optimizers_are_unscaled_once() -> None:
    shared, mine = parameter(1.0), parameter(2.0)
    first, second = tp.optim.SGD([shared], lr=0.125), tp.optim.SGD([shared, mine], lr=0.125)
    scaler = scaler_of()
    scaler.scale((shared * shared + mine * mine).sum()).backward()
    scaler.unscale_(first)
    scaler.unscale_(second)
    assert (shared.grad.tolist(), mine.grad.tolist()) == ([2.0], [4.0])
    tp.nn.utils.clip_grad_value_([shared], 1.0)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (shared.tolist(), mine.tolist()) == ([0.75], [1.5])


def test_and_if_the_first_has_stepped() -> None:
    shared = parameter(1.0)
    optimizers = [tp.optim.SGD([shared], lr=0.125) for _ in range(3)]
    scaler = scaler_of()
    scaler.scale((shared * 2).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert shared.tolist() == [0.25]


def test_what_is_added_after_a_step_is_scaled_for_the_next_optimizer() -> None:
    shared = parameter(1.0)
    first, second = tp.optim.SGD([shared], lr=0.125), tp.optim.SGD([shared], lr=0.125)
    scaler = scaler_of()
    scaler.scale((shared * 2).sum()).backward()
    scaler.step(first)
    first.zero_grad()
    scaler.scale((shared * 4).sum()).backward()
    scaler.step(second)
    assert shared.tolist() == [1.0 - 0.25 - 0.5]


def test_float16_gradients_that_another_has_divided_are_refused_where_that_is_not_known() -> None:
    shared = parameter(1.0, dtype=tp.bfloat16)
    half = parameter(1.0, dtype=tp.float16)
    first = tp.optim.SGD([shared], lr=0.125)
    second = tp.optim.SGD([{"params": [shared]}, {"params": [half]}], lr=0.125, fused=True)
    scaler = scaler_of()
    scaler.scale(tp.ones(()))
    shared.grad, half.grad = tp.ones(1).to(tp.bfloat16), tp.ones(1).to(tp.float16)
    scaler.step(first)
    with pytest.raises(ScalerProtocolError, match=r"1 parameter\(s\) of a SGD with float16 gradients.*one optimizer"):
        scaler.step(second)


# Containers


class Losses(NamedTuple):
    first: Any
    rest: Any


def value(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return {key: value(each) for key, each in outputs.items()}
    return [value(each) for each in outputs] if isinstance(outputs, list | tuple) else outputs.item()


@pytest.mark.parametrize(
    "build",
    [
        lambda a, b: [a, b],
        lambda a, b: (a, b),
        lambda a, b: [a, (b, [a])],
        lambda a, b: {"a": a, "b": [b]},
        lambda a, b: OrderedDict(a=a, b=b),
        lambda a, b: Losses(a, [b, a]),
        lambda a, b: [],
    ],
    ids=["list", "tuple", "nested", "dict", "ordered", "named tuple", "empty"],
)
def test_containers_stay_what_they_are(build: Any) -> None:
    scaled = scaler_of(init_scale=8.0).scale(build(tp.tensor(1.0), tp.tensor(2.0)))
    expected = build(tp.tensor(8.0), tp.tensor(16.0))
    assert type(scaled) is type(expected)
    assert value(scaled) == value(expected)


def test_a_generator_gives_an_iterator() -> None:
    scaled = scaler_of(init_scale=8.0).scale(tp.tensor(float(one)) for one in range(3))
    assert iter(scaled) is scaled
    assert [one.item() for one in scaled] == [0.0, 8.0, 16.0]


@pytest.mark.parametrize("wrong", [3.0, "loss", None, ["loss"], {"a": 1}], ids=repr)
def test_what_is_no_tensor_is_refused(wrong: Any) -> None:
    with pytest.raises(ScalingError, match=r"outputs must be a Tensor or an iterable of Tensors; got .* of type"):
        scaler_of().scale(wrong)


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("float16", (), "float32"),
        ("float16", (1,), "float16"),
        ("bfloat16", (), "float32"),
        ("float32", (), "float32"),
        ("float64", (), "float64"),
    ],
)
def test_a_scaled_loss_has_the_dtype_of_type_promotion(dtype: str, shape: tuple[int, ...], expected: str) -> None:
    scaled = scaler_of(init_scale=2.0**17).scale(
        tp.ones(*shape).to(getattr(tp, dtype)) if shape else tp.ones(()).to(getattr(tp, dtype))
    )
    assert scaled.dtype == getattr(tp, expected)
    assert math.isfinite(scaled.item()) is (expected != "float16")
