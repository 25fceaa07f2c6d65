"""What repairs give: the widest dtype in any order, a destination's dtype, float32 where a kernel is lacking.

`test_repairs_in_force.py` says where they are in force, and where not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.torch import autocast

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = (BF16, F16, F32, F64)
PAIRS = [pair for pair in itertools.product(DTYPES, DTYPES) if pair[0] is not pair[1]]
pairs = pytest.mark.parametrize(("one", "other"), PAIRS, ids=str)
lows = pytest.mark.parametrize("low", [BF16, F16], ids=str)

GENERATOR = torch.Generator().manual_seed(0)
# Of few digits, so that no cast to any dtype changes them, nor do sums of a few of their products.
A, B = (torch.randint(-8, 9, (2, 4, 4), generator=GENERATOR) / 8).unbind()
ROWS = torch.tensor([2, 0, 1])
PLACES = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1], [1, 0, 3, 2]])
CLASSES = torch.tensor([0, 3, 1, 2])

Call = Callable[[Tensor, Tensor], Tensor]

# The result has the widest dtype of the inputs, and is exact in it for these inputs.
WIDEST: dict[str, Call] = {
    "index_put": lambda a, b: torch.index_put(a, (ROWS,), b[:3], accumulate=True),
    "index_add": lambda a, b: torch.index_add(a, 0, ROWS, b[:3]),
    "index_copy": lambda a, b: torch.index_copy(a, 0, ROWS, b[:3]),
    "scatter_reduce": lambda a, b: torch.scatter_reduce(a, 0, PLACES, b, "amax"),
    "scatter": lambda a, b: torch.scatter(a, 0, PLACES, b),
    "scatter_add": lambda a, b: torch.scatter_add(a, 0, PLACES, b),
    "masked_scatter": lambda a, b: torch.masked_scatter(a, a > 0, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "vdot": lambda a, b: torch.vdot(a[0], b[0]),
    "mv": lambda a, b: torch.mv(a, b[0]),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "cross": lambda a, b: torch.linalg.cross(a[:, :3], b[:, :3]),
    "heaviside": torch.heaviside,
    "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 4, 4, dtype=b.dtype)),
}


def widest(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return torch.promote_types(one, other)


@lows
@pairs
@pytest.mark.parametrize("name", WIDEST)
def test_the_widest_dtype_in_any_order(name: str, one: torch.dtype, other: torch.dtype, low: torch.dtype) -> None:
    with autocast("cpu", dtype=low):
        result = WIDEST[name](A.to(one), B.to(other))
    assert result.dtype is widest(one, other)
    assert torch.equal(result.double(), WIDEST[name](A.double(), B.double()))


def product_dtype(one: torch.dtype, other: torch.dtype, low: torch.dtype) -> torch.dtype:
    """Give the dtype of a product by PyTorch's rule: the region's, unless float64 is among the inputs."""
    return F64 if F64 in (one, other) else low


# Products of matrices have the region's dtype, of mixed inputs as of float32 ones.
PRODUCTS: dict[str, Call] = {
    "mm": torch.mm,
    "matmul": torch.matmul,
    "linear": F.linear,
    "linear with bias": lambda a, b: F.linear(a, b, b[0]),
    "addmm": lambda a, b: torch.addmm(b, a, b),
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "inner": torch.inner,
    "conv1d": lambda a, b: F.conv1d(a[None], b[:, :, None]),
    "conv2d": lambda a, b: F.conv2d(a[None, None], b[None, None]),
    "conv_transpose2d": lambda a, b: F.conv_transpose2d(a[None, None], b[None, None]),
}


@lows
@pairs
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_in_any_order(name: str, one: torch.dtype, other: torch.dtype, low: torch.dtype) -> None:
    with autocast("cpu", dtype=low):
        result = PRODUCTS[name](A.to(one), B.to(other))
    reference = PRODUCTS[name](A.double(), B.double())
    assert result.dtype is product_dtype(one, other, low)
    # Inputs are exact; sums of up to 17 products below 1 are rounded to the result's digits, twice with a bias.
    torch.testing.assert_close(result.double(), reference, rtol=2 * torch.finfo(result.dtype).eps, atol=2**-4)


@lows
@pairs
def test_layer_norm(one: torch.dtype, other: torch.dtype, low: torch.dtype) -> None:
    a, b = A.to(one), B.to(other)
    with autocast("cpu", dtype=low):
        result = F.layer_norm(a, (4,), b[0], b[1])
    # PyTorch's kernel takes a lower-precision input next to float32 weights, and gives the dtype of the input.
    assert result.dtype is (one if other is F32 and one.itemsize == 2 else widest(one, other))
    reference = F.layer_norm(A.double(), (4,), B[0].double(), B[1].double())
    torch.testing.assert_close(result.double(), reference, rtol=0, atol=8 * torch.finfo(result.dtype).eps)


@lows
@pairs
@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_losses_with_weights_of_classes(loss: Any, one: torch.dtype, other: torch.dtype, low: torch.dtype) -> None:
    with autocast("cpu", dtype=low):
        result = loss(A.to(one), CLASSES, weight=B[0].abs().to(other))
    assert result.dtype is widest(widest(one, other), F32)
    reference = loss(A.double(), CLASSES, weight=B[0].abs().double())
    torch.testing.assert_close(result.double(), reference, rtol=2**-20, atol=0)


# Writes

WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_put_": lambda a, b: a.index_put_((ROWS,), b[:3]),
    "scatter_": lambda a, b: a.scatter_(0, PLACES, b),
    "index_add_": lambda a, b: a.index_add_(0, ROWS, b[:3]),
    "index_copy_": lambda a, b: a.index_copy_(0, ROWS, b[:3]),
    "masked_scatter_": lambda a, b: a.masked_scatter_(PLACES.new_ones(4, 4).bool(), b),
    "lerp_": lambda a, b: a.lerp_(b, 0.5),
    "addmm_": lambda a, b: a.addmm_(b, b),
    "addmv_": lambda a, b: a[0].addmv_(b, b[0]),
    "mm out": lambda a, b: torch.mm(b, b, out=a),
    "mul out": lambda a, b: torch.mul(b, b, out=a),
    "cat out": lambda a, b: torch.cat([b[:2], b[2:]], out=a),
    "linalg.inv out": lambda a, b: torch.linalg.inv(b + 4 * torch.eye(4, dtype=b.dtype), out=a),
}


@lows
@pairs
@pytest.mark.parametrize("name", WRITES)
def test_a_write_has_the_destinations_dtype(name: str, one: torch.dtype, other: torch.dtype, low: torch.dtype) -> None:
    destination, source = A.to(one).clone(), B.to(other)
    address = destination.data_ptr()
    with autocast("cpu", dtype=low):
        result = WRITES[name](destination, source)
    reference = A.double().clone()
    WRITES[name](reference, B.double())
    assert result.data_ptr() == destination.data_ptr() == address
    assert destination.dtype is one
    assert torch.equal(source, B.to(other))
    atol = 0.0 if name in EXACT else 4 * torch.finfo(one).eps * reference.abs().max().item()
    if "out" in name:  # computed in a lower precision, maybe
        atol = max(atol, 4 * torch.finfo(low).eps * reference.abs().max().item())
    torch.testing.assert_close(destination.double(), reference, rtol=0, atol=atol)


EXACT = ("index_put_", "scatter_", "index_copy_", "masked_scatter_")


@pairs
def test_a_cast_source_is_what_is_written(one: torch.dtype, other: torch.dtype) -> None:
    fine = torch.rand(3, 4, dtype=F64, generator=GENERATOR).to(other)
    destination = A.to(one).clone()
    with autocast("cpu"):
        destination[ROWS] = fine
    assert torch.equal(destination[ROWS], fine.to(one))


@pytest.mark.parametrize("one", DTYPES, ids=str)
@pytest.mark.parametrize("other", DTYPES, ids=str)
def test_lists_of_foreach_ops_are_written_in_place(one: torch.dtype, other: torch.dtype) -> None:
    """An average of weights, as `torch.optim.swa_utils` keeps one."""
    averages, weights = [A.to(one).clone() for _ in range(3)], [B.to(other) for _ in range(3)]
    kept = list(averages)
    with torch.no_grad(), autocast("cpu"):
        torch._foreach_lerp_(averages, weights, 0.25)
        torch._foreach_mul_(averages, 2.0)
    wanted = 2 * torch.lerp(A.double(), B.double(), 0.25)
    for average, before in zip(averages, kept, strict=True):
        assert average is before
        assert average.dtype is one
        torch.testing.assert_close(average.double(), wanted, rtol=0, atol=4 * torch.finfo(one).eps)


def test_an_out_that_has_to_grow_grows() -> None:
    destination = torch.empty(0, dtype=F16)
    with autocast("cpu"):
        result = torch.mm(A, B.double(), out=destination)
    assert result is destination
    assert destination.shape == (4, 4)
    torch.testing.assert_close(destination.double(), A.double() @ B.double(), rtol=2**-8, atol=2**-8)


# Kernels that are lacking

SQUARE = A + 4 * torch.eye(4)
LACKING: dict[str, Callable[[Tensor], Tensor]] = {
    "linalg.inv": torch.linalg.inv,
    "linalg.det": torch.linalg.det,
    "linalg.lu_factor": lambda m: torch.linalg.lu_factor(m)[0],
    "linalg.solve": lambda m: torch.linalg.solve(m, m[0]),
    "pdist": torch.pdist,
    "sparse softmax": lambda m: torch.sparse.softmax(m.to_sparse(), 1).to_dense(),
    "sparse log_softmax": lambda m: torch.sparse.log_softmax(m.to_sparse(), 1).to_dense(),
}


@lows
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", LACKING)
def test_float32_where_there_is_no_kernel(name: str, dtype: torch.dtype, low: torch.dtype) -> None:
    with autocast("cpu", dtype=low):
        result = LACKING[name](SQUARE.to(dtype))
    assert result.dtype is F32
    assert torch.equal(result, LACKING[name](SQUARE.to(dtype).float()))


@lows
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_a_csr_matrix_times_a_dense_one(low: torch.dtype) -> None:
    csr = A.relu().to_sparse_csr()
    with autocast("cpu", dtype=low):
        results = [csr @ B, csr @ B.to(low), csr.to(low) @ B, csr @ B.double()]
    assert [result.dtype for result in results[3:]] == [F64]
    for result in results:
        tolerance = 4 * torch.finfo(result.dtype).eps
        torch.testing.assert_close(result.double(), A.relu().double() @ B.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@lows
def test_recurrent_nets(kind: Callable[..., nn.Module], low: torch.dtype) -> None:
    """On a CPU there is no LSTM in float16: it is repaired as a whole."""
    torch.manual_seed(0)
    net = kind(4, 5)
    x = torch.rand(3, 2, 4, requires_grad=True)
    with autocast("cpu", dtype=low):
        result = net(x)[0]
    result.float().sum().backward()
    reference = kind(4, 5).double()
    reference.load_state_dict(net.state_dict())
    y = x.detach().double().requires_grad_()
    wanted = reference(y)[0]
    wanted.sum().backward()
    # Values and slopes below one: some roundings to the region's digits in each of three steps.
    torch.testing.assert_close(result.double(), wanted, rtol=0, atol=4 * torch.finfo(low).eps)
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=0, atol=16 * torch.finfo(low).eps)
    assert x.grad.dtype is F32
    assert all(weight.grad.dtype is F32 for weight in net.parameters())
