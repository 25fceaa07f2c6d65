"""Which arguments are cast: every clause of PyTorch's rules, by value, for mezzo's kernels as for PyTorch's own.

Each case runs three ways: under ``torch.autocast``, under mezzo's ``"torch"`` policy (where PyTorch's kernels do the
work) and with mezzo's kernels serving every op of the device's table. All three must give the dtype that the case
states, and the same bits.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mezzo.torch
from mezzo.torch.casting import device_for
from mezzo.torch.kernels import serve_all

if TYPE_CHECKING:
    from collections.abc import Callable

LOW = (torch.bfloat16, torch.float16)
OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
F32, F64, F8 = torch.float32, torch.float64, torch.float8_e4m3fn

low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)


@pytest.fixture(params=["policy torch", "served by mezzo"])
def region(request: pytest.FixtureRequest) -> Callable[[torch.dtype], ExitStack]:
    def make(low: torch.dtype) -> ExitStack:
        stack = ExitStack()
        if request.param == "served by mezzo":
            stack.enter_context(serve_all("cpu"))
            stack.enter_context(mezzo.torch.autocast("cpu", dtype=low))
        else:
            stack.enter_context(mezzo.torch.autocast("cpu", dtype=low, policy="torch"))
        return stack

    return make


def x(dtype: torch.dtype = F32, seed: int = 0, shape: tuple[int, ...] = (4, 4)) -> Tensor:
    """Give numbers between 0 and 1, the same for each dtype up to rounding."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(dtype: torch.dtype) -> Tensor:
    return torch.arange(16).reshape(4, 4).to(dtype)


def put(result: Tensor, call: Callable[[Tensor], object]) -> Tensor:
    call(result)
    return result


# Each case: a call, given the region's dtype, and the dtype in which its result must come out ("low" is the region's).
CASES: dict[str, tuple[Callable[[torch.dtype], Tensor], torch.dtype | str]] = {
    "float32 is cast down": (lambda low: torch.mm(x(), x()), "low"),
    "one float32 is enough": (lambda low: torch.mm(x(low), x()), "low"),
    "the other low dtype is cast again": (lambda low: torch.mm(x(OTHER[low]), x(OTHER[low])), "low"),
    "float8 is cast up": (lambda low: torch.mm(x(F8), x()), "low"),
    "float64 is left alone": (lambda low: torch.mm(x(F64), x(F64)), F64),
    "int64 is left alone": (lambda low: torch.mm(whole(torch.int64), whole(torch.int64)), torch.int64),
    "complex is left alone": (lambda low: torch.mm(x(torch.complex64), x(torch.complex64)), torch.complex64),
    "bool is left alone": (lambda low: torch.cat([whole(torch.bool), whole(torch.bool)]), torch.bool),
    "fp32 casts low up": (lambda low: torch.prod(x(low)), F32),
    "fp32 casts float8 up": (lambda low: torch.prod(x(F8)), F32),
    "fp32 leaves float64": (lambda low: torch.prod(x(F64)), F64),
    "fp32 leaves integers": (lambda low: torch.prod(whole(torch.int32)), torch.int64),
    "fp32 beside float64 is promoted by the op": (lambda low: F.mse_loss(x(F64), x(low)), F64),
    "promote goes to the widest": (lambda low: torch.cat([x(low), x()]), F32),
    "promote goes to the widest in either order": (lambda low: torch.stack([x(), x(low)]), F32),
    "promote keeps the region's dtype": (lambda low: torch.cat([x(low), x(low)]), "low"),
    "promote gives float64 no vote": (lambda low: torch.cat([x(low), x(F64)]), F64),
    "promote leaves integers": (lambda low: torch.stack([whole(torch.int8), whole(torch.int8)]), torch.int8),
    "an integer beside a float is not cast": (
        lambda low: torch.index_copy(x(low), 0, torch.tensor([1, 0]), x(F32, 1)[:2]),
        F32,
    ),
    "every tensor of a list is cast": (lambda low: torch.cat([x(low), x(F32, 1), x(low, 2)]), F32),
    "an optional tensor is cast": (lambda low: F.linear(x(low), x(), x(F32, 2, (4,))), "low"),
    "an optional tensor may be missing": (lambda low: F.linear(x(), x()), "low"),
    "a convolution's bias is cast": (
        lambda low: F.conv1d(x(low, 0, (1, 4, 4)), x(F32, 1, (2, 4, 3)), x(F32, 2, (2,))),
        "low",
    ),
    "out= casts nothing": (lambda low: torch.mm(x(), x(), out=torch.empty(4, 4)), F32),
    "an in-place op casts nothing": (lambda low: put(x(), lambda y: y.addmm_(x(), x())), F32),
    "an in-place op of a listed kind casts nothing": (lambda low: put(x(low), Tensor.exp_), "low"),
    "@= rebinds to a product": (lambda low: x().__matmul__(x()), "low"),
    "a dtype that is given is kept": (lambda low: torch.prod(x(), dtype=OTHER[low]), "other"),
    "a float64 dtype that is given is kept": (lambda low: torch.prod(x(low), 0, dtype=F64), F64),
    "an unlisted op runs as it comes": (lambda low: x(low).softmax(-1), "low"),
    "an unlisted op promotes as ever": (lambda low: x(low) + x(), F32),
    "the insides of an unlisted composite are cast": (lambda low: torch.tensordot(x(), x(), dims=1), "low"),
    "the insides of a listed op are not cast again": (lambda low: F.grid_sample(*grid(low)), F32),
    "a sparse matrix is cast": (lambda low: torch.mm(x().to_sparse(), x()), "low"),
    "a sparse weight is cast": (lambda low: torch.mm(x().to_sparse().requires_grad_(), x()).detach(), "low"),
}


def grid(low: torch.dtype) -> tuple[Tensor, Tensor, str, str, bool]:
    return x(low, 0, (1, 1, 4, 4)), x(F32, 1, (1, 2, 2, 2)), "bilinear", "zeros", False


@low_dtypes
@pytest.mark.parametrize("case", CASES)
def test_a_call_gives_the_dtype_and_the_bits_that_pytorch_gives(region, case, low):
    call, stated = CASES[case]
    expected_dtype = {"low": low, "other": OTHER[low]}.get(str(stated), stated)
    with torch.autocast("cpu", dtype=low):
        expected = call(low)
    assert expected.dtype == expected_dtype
    with region(low):
        found = call(low)
    assert found.dtype == expected_dtype
    assert torch.equal(found, expected)


FAILURES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "lower precision beside float64": lambda low: torch.mm(x(F64), x()),
    "out= of another dtype than the inputs'": lambda low: torch.mm(x(), x(), out=torch.empty(4, 4, dtype=low)),
    "in place with mixed dtypes": lambda low: x().addmm_(x(low), x()),
}


@low_dtypes
@pytest.mark.parametrize("case", FAILURES)
def test_what_fails_in_pytorch_fails_with_its_text(region, case, low):
    with pytest.raises(RuntimeError) as expected, torch.autocast("cpu", dtype=low):
        FAILURES[case](low)
    with pytest.raises(RuntimeError) as found, region(low):
        FAILURES[case](low)
    assert str(found.value) == str(expected.value)


def all_dtypes() -> list[torch.dtype]:
    return sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore::UserWarning")  # quantized and half-complex dtypes warn when made
@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_eligible_are_the_floating_dtypes_except_float64(dtype):
    tensor = torch.empty(1, dtype=dtype)
    assert device_for("cpu").eligible(tensor) == (tensor.is_floating_point() and dtype != torch.float64)


def test_mkldnn_tensors_count_to_the_cpu_and_other_devices_do_not():
    assert device_for("cpu").eligible(x().to_mkldnn())
    assert not device_for("cpu").eligible(torch.empty(1, device="meta"))
    assert not device_for("cuda").eligible(x())


@low_dtypes
def test_tensors_of_another_device_are_not_cast(region, low):
    meta = torch.empty(4, 4, device="meta")
    with region(low):
        assert torch.mm(meta, meta).dtype == torch.float32


@low_dtypes
def test_nested_tensors_are_cast(region, low):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once per process: nested tensors are a prototype
        nested = torch.nested.nested_tensor([x(), x(F32, 1)])
    with region(low):
        assert torch.matmul(nested, nested).dtype == low


class Tagged(torch.Tensor):
    """A subclass that counts the calls it sees."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@low_dtypes
@pytest.mark.parametrize("op", [torch.mm, torch.prod, torch.cat, torch.stack], ids=lambda op: op.__name__)
def test_a_subclass_keeps_its_class_and_sees_one_call(region, low, op):
    tagged = x().as_subclass(Tagged)
    args = {torch.mm: (tagged, x()), torch.prod: (tagged,)}.get(op, ([tagged, x()],))
    with region(low):
        Tagged.calls.clear()
        result = op(*args)
        assert Tagged.calls == [op.__name__]
    assert type(result) is Tagged


@low_dtypes
def test_a_parameter_gives_a_tensor(region, low):
    with region(low):
        product = torch.mm(torch.nn.Parameter(x()), x())
    assert type(product) is Tensor
    assert product.dtype == low
