"""Gradients of every dtype and layout are unscaled, in float32 or wider, and checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import GradScaler

from .runs import INF, NAN, assert_same

DENSE = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz]
each_dtype = pytest.mark.parametrize("dtype", DENSE, ids=str)
each_layout = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
# 1000 is no power of two, so rounding shows: multiplied in float16 by a float16 inverse, most of these values differ.
SCALE = 1000.0


def values_of(dtype: torch.dtype, count: int = 64) -> Tensor:
    torch.manual_seed(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return (torch.randn(count, dtype=wide) * 50).to(dtype)


def expected(scaled: Tensor) -> Tensor:
    """Unscale in float32 by the inverse rounded to float32, as PyTorch does; wider dtypes in their own."""
    inverse = torch.tensor(SCALE).double().reciprocal().float()
    if scaled.dtype in (torch.float64, torch.complex128):
        return scaled * inverse.double()
    wide = torch.complex64 if scaled.dtype.is_complex else torch.float32
    return (scaled.to(wide) * inverse).to(scaled.dtype)


def setup(grad: Tensor, scale: float = SCALE) -> tuple[nn.Parameter, torch.optim.Optimizer, GradScaler]:
    """Make a parameter at zero that has this gradient, as if a backward of a scaled loss had left it."""
    weight = nn.Parameter(torch.zeros(grad.shape).to(grad.dtype))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    weight.grad = grad
    return weight, optimizer, scaler


def as_sparse(values: Tensor) -> Tensor:
    """Spread over the even rows of a sparse tensor; not coalesced, each index once."""
    rows = values.view(-1, 4)
    indices = torch.arange(0, 2 * len(rows), 2)[None]
    return torch.sparse_coo_tensor(indices, rows, (2 * len(rows), 4), check_invariants=True)


@each_dtype
@each_layout
def test_the_unscaled_gradient_is_the_quotient(dtype: torch.dtype, sparse: bool) -> None:
    values = values_of(dtype)
    weight, optimizer, scaler = setup(as_sparse(values.clone()) if sparse else values.clone())
    scaler.unscale_(optimizer)
    assert weight.grad.dtype is dtype
    assert weight.grad.is_sparse is sparse
    got = weight.grad.coalesce().values().view(-1) if sparse else weight.grad
    assert_same([got], [expected(values)])
    assert [found.item() for found in scaler._found_inf_per_device(optimizer).values()] == [0.0]


@each_dtype
@each_layout
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_training_steps_with_it(dtype: torch.dtype, sparse: bool, unscale: bool) -> None:
    values = values_of(dtype)
    weight, optimizer, scaler = setup(as_sparse(values.clone()) if sparse else values.clone())
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    moved = -weight.detach()
    assert_same([moved[::2].reshape(-1) if sparse else moved], [expected(values)])


@each_dtype
@each_layout
@pytest.mark.parametrize("fault", [INF, -INF, NAN], ids=str)
def test_what_is_not_finite_is_found(dtype: torch.dtype, sparse: bool, fault: float) -> None:
    values = values_of(dtype)
    values[17] = fault
    weight, optimizer, scaler = setup(as_sparse(values) if sparse else values)
    scaler.step(optimizer)
    scaler.update()
    assert not weight.any()
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_an_imaginary_part_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    values = values_of(dtype)
    values[17] = complex(1.0, INF)
    weight, optimizer, scaler = setup(values)
    scaler.step(optimizer)
    assert not weight.any()


def test_float16_indices_that_come_twice_are_added_before_the_check() -> None:
    # Each value is finite, their sum in float16 is not, and the optimizer would add them so.
    largest = torch.finfo(torch.float16).max
    values = torch.tensor([[largest], [largest]], dtype=torch.float16)
    grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), values, (4, 1), check_invariants=True)
    weight, optimizer, scaler = setup(grad)
    scaler.step(optimizer)
    scaler.update()
    assert not weight.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_indices_that_come_twice_are_unscaled_as_their_sum(dtype: torch.dtype) -> None:
    values = torch.tensor([[8.0], [16.0], [4.0]], dtype=dtype)
    grad = torch.sparse_coo_tensor(torch.tensor([[1, 1, 3]]), values, (4, 1), check_invariants=True)
    weight, optimizer, scaler = setup(grad, 4.0)
    scaler.unscale_(optimizer)
    assert weight.grad.to_dense().view(-1).tolist() == [0.0, 6.0, 0.0, 1.0]
    scaler.step(optimizer)
    assert weight.view(-1).tolist() == [0.0, -6.0, 0.0, -1.0]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_gradients_unscale(dtype: torch.dtype) -> None:
    values = torch.tensor([8.0, -16.0, 0.5, 12.0]).to(dtype)
    weight, optimizer, scaler = setup(values, 4.0)
    scaler.unscale_(optimizer)
    assert weight.grad.dtype is dtype
    assert weight.grad.float().tolist() == [2.0, -4.0, 0.125, 3.0]
    assert [found.item() for found in scaler._found_inf_per_device(optimizer).values()] == [0.0]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_a_nan_in_a_float8_gradient_is_found(dtype: torch.dtype) -> None:
    _, optimizer, scaler = setup(torch.tensor([8.0, NAN]).to(dtype), 4.0)
    scaler.unscale_(optimizer)
    assert [found.item() for found in scaler._found_inf_per_device(optimizer).values()] == [1.0]


def test_all_dtypes_in_one_optimizer() -> None:
    grads = [values_of(dtype) for dtype in DENSE] + [as_sparse(values_of(torch.float32))]
    weights = [nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype)) for grad in grads]
    optimizer, scaler = torch.optim.SGD(weights, lr=1.0), GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad.clone()
    scaler.step(optimizer)
    assert_same([-weight.detach() for weight in weights[:-1]], [expected(grad) for grad in grads[:-1]])


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.t(),
        lambda grad: grad[::2],
        lambda grad: grad.t().contiguous().t(),
        lambda grad: torch.zeros(0, 3),
        lambda grad: torch.tensor(2.0),
    ],
    ids=["transposed", "strided", "column-major", "empty", "0-dim"],
)
def test_any_strides(change: Any) -> None:
    grad = change(torch.arange(24.0).view(4, 6))
    weight, optimizer, scaler = setup(grad, 4.0)
    before = grad.clone()
    scaler.unscale_(optimizer)
    assert_same([weight.grad.contiguous()], [before.contiguous() / 4])
    scaler.step(optimizer)
    assert_same([-weight.detach()], [before.contiguous() / 4 + 0.0])
