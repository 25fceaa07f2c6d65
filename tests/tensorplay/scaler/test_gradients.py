"""Gradients are divided exactly, and Inf and NaN are found wherever they are; the package's kernel finds not all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorplay as tp

from mezzo.tensorplay.scaling.gradients import Gradients

from .runs import parameter, scaler_of

DTYPES = ["float32", "bfloat16", "float64"]
BAD = {"inf": math.inf, "minus inf": -math.inf, "nan": math.nan}


def holder(*gradients: Any) -> Any:
    """Make an optimizer whose parameters have these gradients."""
    params = []
    for gradient in gradients:
        one = tp.nn.Parameter(tp.zeros(*gradient.shape).to(gradient.dtype))
        one.grad = gradient
        params.append(one)
    return tp.optim.SGD(params, lr=1.0)


def unscaled(optimizer: Any, scale: float) -> Any:
    scaler = scaler_of(init_scale=scale)
    scaler.scale(tp.ones(()))
    scaler.unscale_(optimizer)
    return scaler


def grads_of(optimizer: Any) -> list[Any]:
    return [one.grad.tolist() for one in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [-24, -1, 0, 1, 16, 30, 126])
def test_a_power_of_two_divides_exactly(dtype: str, power: int) -> None:
    values = tp.tensor([1.0, -1.7, 3.14159, 2.0**-10]).to(getattr(tp, dtype))
    expected = values.to(tp.float64) / 2.0**power
    gradient = values.clone()
    unscaled(holder(gradient), 2.0**power)
    # Below 2**-126 float32 and bfloat16 have fewer digits, and some platforms none.
    exact = 2.0**-10 / 2.0**power >= 2.0**-126 or dtype == "float64"
    kept = slice(0, 4) if exact else slice(0, 0)
    assert gradient.to(tp.float64).tolist()[kept] == expected.tolist()[kept]
    assert all(math.isfinite(one) for one in gradient.tolist())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [3.0, 1000.0, 0.1, 65521.0])
def test_another_scale_divides_as_the_packages_kernel(dtype: str, scale: float) -> None:
    tp.manual_seed(0)
    ours = (tp.randn(999) * scale).to(getattr(tp, dtype))
    theirs = ours.clone()
    unscaled(holder(ours), scale)
    rounded = tp.full((), scale).to(tp.float64)
    inverse = tp.full((), 1.0, dtype=tp.float64).div(rounded).to(tp.float32)
    tp._amp_foreach_non_finite_check_and_unscale_([theirs], tp.zeros(()), inverse)
    assert ours.tolist() == theirs.tolist()


def test_float64_gradients_keep_their_digits_and_their_range() -> None:
    gradient = tp.full((2,), math.pi, dtype=tp.float64)
    huge = tp.full((2,), 1e300, dtype=tp.float64)
    optimizer = holder(gradient, huge)
    scaler = unscaled(optimizer, 65536.0)
    assert grads_of(optimizer) == [[math.pi / 65536.0] * 2, [1e300 / 65536.0] * 2]
    scaler.step(optimizer)
    assert scaler.stepped(optimizer)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 7, 16, 17, 4097])
def test_what_is_not_finite_is_found_anywhere(numel: int, dtype: str, bad: float) -> None:
    for at in {0, numel // 2, numel - 1}:
        gradient = tp.ones(numel).to(getattr(tp, dtype))
        gradient[at] = bad
        scaler = unscaled(optimizer := holder(tp.ones(3), gradient), 4.0)
        scaler.step(optimizer)
        assert not scaler.stepped(optimizer)
        [found] = scaler.nonfinite(optimizer)
        assert (found.nan, found.inf, found.numel, found.dtype) == (
            int(math.isnan(bad)),
            int(math.isinf(bad)),
            numel,
            dtype,
        )


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_each_dtype_of_an_optimizer_is_looked_at(at: int, bad: float) -> None:
    gradients = [tp.full((2,), 8.0).to(dtype) for dtype in (tp.float32, tp.bfloat16, tp.float64, tp.complex64)]
    gradients[at][1] = bad
    scaler = unscaled(optimizer := holder(*gradients), 8.0)
    assert [one.to(tp.complex64)[0].real.item() for one in gradients] == [1.0] * 4
    scaler.step(optimizer) if at < 3 else None
    assert scaler._turns[id(optimizer)].found == ("nan" if math.isnan(bad) else "inf")


def test_inf_beside_nan_counts_as_inf() -> None:
    scaler = unscaled(optimizer := holder(tp.tensor([math.nan, math.inf, -math.inf, 1.0])), 2.0)
    scaler.step(optimizer)
    [found] = scaler.nonfinite(optimizer)
    assert (found.nan, found.inf) == (1, 2)
    assert scaler._turns[id(optimizer)].found == "inf"


def test_finite_gradients_whose_sum_overflows_are_finite() -> None:
    optimizer = holder(tp.full((4,), 3e38), tp.full((4,), 3e38).to(tp.bfloat16))
    scaler = unscaled(optimizer, 1.0)
    scaler.step(optimizer)
    assert scaler.stepped(optimizer)


def test_inf_and_minus_inf_do_not_cancel() -> None:
    optimizer = holder(tp.tensor([math.inf, 1.0]), tp.tensor([-math.inf, 1.0]))
    scaler = unscaled(optimizer, 1.0)
    scaler.step(optimizer)
    assert not scaler.stepped(optimizer)


def test_a_quotient_that_overflows_is_found() -> None:
    scaler = unscaled(optimizer := holder(tp.full((2,), 2.0**120)), 2.0**-24)
    scaler.step(optimizer)
    assert not scaler.stepped(optimizer)


def test_gradients_beside_one_that_is_not_finite_are_divided_all_the_same() -> None:
    optimizer = holder(tp.tensor([8.0, math.inf]), tp.tensor([8.0]))
    unscaled(optimizer, 8.0)
    assert grads_of(optimizer) == [[1.0, math.inf], [1.0]]


def test_shapes_and_layouts_of_all_kinds() -> None:
    table = tp.full((4, 4), 8.0)
    rows = tp.full((3, 2), 8.0)
    optimizer = holder(
        tp.tensor(8.0), tp.zeros(0), table[:, 1], rows.t(), tp.zeros(2, 0), tp.tensor([8.0]).expand(3), tp.zeros(0)
    )
    scaler = unscaled(optimizer, 8.0)
    assert grads_of(optimizer) == [1.0, [], [1.0] * 4, [[1.0] * 3] * 2, [[], []], [1.0] * 3, []]
    assert table[:, 0].tolist() == [8.0] * 4
    scaler.step(optimizer)
    assert scaler.stepped(optimizer)


def test_inf_beside_a_strided_gradient_is_nobodys() -> None:
    table = tp.full((4, 4), math.inf)
    table[:, 1] = 8.0
    scaler = unscaled(optimizer := holder(table[:, 1]), 8.0)
    scaler.step(optimizer)
    assert scaler.stepped(optimizer)


def test_a_thousand_gradients() -> None:
    gradients = [tp.full((3,), 8.0) for _ in range(1000)]
    optimizer = holder(*gradients, tp.tensor([math.nan]))
    scaler = unscaled(optimizer, 8.0)
    assert all(one.tolist() == [1.0] * 3 for one in gradients)
    scaler.step(optimizer)
    assert [one.name for one in scaler.nonfinite(optimizer)] == ["param_groups[0]['params'][1000]"]


def test_one_gradient_of_two_parameters_is_divided_once() -> None:
    gradient = tp.full((3,), 8.0)
    unscaled(holder(gradient, gradient), 8.0)
    assert gradient.tolist() == [1.0] * 3


@pytest.mark.parametrize(("value", "made"), [(8.0, True), (math.inf, False)])
def test_sparse_gradients(value: float, made: bool) -> None:
    weight = tp.nn.Parameter(tp.zeros(4, 2))
    weight.grad = tp.sparse_coo_tensor(
        tp.tensor([[0, 2, 2]]), tp.tensor([[8.0, 16.0], [8.0, 8.0], [8.0, value]]), (4, 2)
    )
    optimizer = tp.optim.SGD([weight], lr=1.0)
    scaler = scaler_of(init_scale=8.0)
    scaler.scale(tp.ones(()))
    scaler.step(optimizer)
    assert scaler.stepped(optimizer) is made
    assert weight.tolist() == ([[-1.0, -2.0], [0.0, 0.0], [-2.0, -2.0], [0.0, 0.0]] if made else [[0.0, 0.0]] * 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_reason_not_to_ask_isfinite_still_holds(dtype: str) -> None:
    # If this fails, TensorPlay has learnt it, and the counting may do without a float32 copy.
    low = tp.tensor([math.inf]).to(getattr(tp, dtype))
    assert low.isfinite().tolist() == [True]
    assert low.isinf().tolist() == [False]
    weight = parameter(0.0, dtype=getattr(tp, dtype))
    weight.grad = low
    assert not Gradients(tp.optim.SGD([weight], lr=1.0)).look_finite()
    assert [(nan, inf) for _, nan, inf in Gradients(tp.optim.SGD([weight], lr=1.0)).count()] == [(0, 1)]
