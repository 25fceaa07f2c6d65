"""Compiled code is repaired as eager code is: calls that only the real kernels refuse, and no kernel that tracing runs."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.torch import autocast, observe, set_default_policy

NO_COMPILER = "needs a C++ compiler: Inductor compiles what it generates for the CPU"
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason=NO_COMPILER)
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROWS = torch.arange(4)
CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "index_add": lambda a, b: torch.index_add(a, 0, ROWS, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "mm": torch.mm,
    "linear": nn.functional.linear,
    "index_put_": lambda a, b: a.clone().index_put_((ROWS,), b),
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "pdist": lambda a, b: torch.pdist(a.bfloat16()) * b.sum(),
    "scatter": lambda a, b: torch.scatter(a, 0, ROWS[None], b[:1]),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "addmm_": lambda a, b: a.clone().addmm_(b, b),
}
REFUSED = ["index_add", "mm", "linear", "index_put_", "pdist", "addmm_"]
MIXTURES = [(BF16, F32), (F64, F32), (F32, F64), (BF16, F16)]

# Inductor uses what PyTorch's own notice advises against.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def given(*dtypes: torch.dtype, rows: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(rows, 4, generator=generator).to(dtype).requires_grad_() for dtype in dtypes]


def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor | None]:
    """Give the output of a call in a region and the gradients of the inputs."""
    with autocast("cpu"):
        out = function(*inputs)
    gradients = torch.autograd.grad(out.sum(), inputs, allow_unused=True) if out.requires_grad else []
    return [out.detach(), *gradients]


def assert_as_eager(function: Callable[..., Tensor], inputs: list[Tensor], tolerance: float = 0.0, **how: Any) -> None:
    expected = results(function, inputs)
    found = results(torch.compile(function, fullgraph=True, **how), inputs)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_call_gives_what_the_eager_one_gives(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    assert_as_eager(CASES[name], given(*dtypes), backend="aot_eager")


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_stay_dynamic(name: str) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return CASES[name](a[:4], b[:4]).sum() + a.sum() * b.shape[0]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 6, 7):
            inputs = given(F64, F32, rows=rows)
            torch.testing.assert_close(results(compiled, inputs), results(function, inputs), rtol=0, atol=0)


def test_the_size_of_a_repaired_call_itself_stays_dynamic() -> None:
    compiled = torch.compile(torch.mm, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 5, 7):
            a, b = given(F64, rows=rows)[0], given(F32)[0]
            torch.testing.assert_close(results(compiled, [a, b]), results(torch.mm, [a, b]), rtol=0, atol=0)


@needs_compiler
@pytest.mark.parametrize("name", REFUSED)
def test_inductor(name: str) -> None:
    # It fuses, and rounds to bfloat16 less often than eager code does.
    assert_as_eager(CASES[name], given(F64, F32), tolerance=1e-2, backend="inductor")


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
def test_a_write_into_an_input(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    def write(a: Tensor, b: Tensor) -> Tensor:
        return a.addmm_(b, b).index_put_((ROWS,), b, accumulate=True)

    expected, found, other = (tensor.detach() for tensor in given(dtypes[0], dtypes[0], dtypes[1]))
    found.copy_(expected)
    with autocast("cpu"):
        write(expected, other)
        out = torch.compile(write, backend="aot_eager", fullgraph=True)(found, other)
    assert out is found
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_a_write_into_a_destination(dtype: torch.dtype) -> None:
    def write(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return torch.mm(a, b, out=out)

    a, b, expected, found = (tensor.detach() for tensor in given(F32, F64, dtype, dtype))
    with autocast("cpu"):
        write(a, b, expected)
        out = torch.compile(write, backend="aot_eager", fullgraph=True)(a, b, found)
    assert out is found
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("function", [torch.pdist, torch.linalg.inv, torch.linalg.eigvalsh])
def test_no_kernel_for_a_low_dtype(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    def called(a: Tensor) -> Tensor:
        return function(a + torch.eye(4, dtype=a.dtype))

    assert_as_eager(called, given(dtype), backend="aot_eager")


def test_a_policy_that_casts_to_a_dtype_that_the_op_has_no_kernel_for() -> None:
    policy = mezzo.builtin_policy("default").override({"pdist": "lower_precision_fp", "mm": "fp32"}, name="custom")

    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b).sum() + torch.pdist(b).sum()

    a, b = given(F64, F32)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with autocast("cpu", policy=policy):
        expected, found = function(a, b), compiled(a, b)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.dtype is F64


def test_a_plain_region_under_a_default_policy() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b) + torch.index_add(b, 0, ROWS, a)

    a, b = given(F64, F32)
    set_default_policy("default")
    try:
        with torch.autocast("cpu"):
            expected = function(a, b)
            found = torch.compile(function, backend="aot_eager", fullgraph=True)(a, b)
    finally:
        set_default_policy(None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_region_inside_of_the_compiled_code() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        with autocast("cpu"):
            return torch.mm(a, b)

    a, b = given(F64, F32)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(a, b)
    torch.testing.assert_close(found, function(a, b), rtol=0, atol=0)


def test_vmap() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.func.vmap(lambda a, b: torch.index_add(a, 0, ROWS, b))(a.view(2, 4, 2), b.view(2, 4, 2))

    assert_as_eager(function, given(BF16, F32, rows=4), backend="aot_eager")


def test_a_product_under_vmap() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.func.vmap(torch.mm, in_dims=(0, None))(a.view(2, 2, 4), b)

    a, b = given(F64, F32)
    with autocast("cpu"):
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(a, b)
    torch.testing.assert_close(found.view(4, 4), a @ b.double(), rtol=1e-12, atol=0)


def test_the_dtype_is_known_while_the_code_is_traced() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        out = torch.mm(a, b)
        return out if out.dtype is F64 else out * 0

    assert_as_eager(function, given(F64, F32), backend="aot_eager")


def test_a_large_call_is_tried_out_on_a_small_one() -> None:
    a, b = torch.rand(2048, 1024, dtype=F64), torch.rand(1024, 2)
    assert_as_eager(torch.mm, [a, b], backend="aot_eager")


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), autocast("cpu"):
        torch.compile(CASES[name], backend="aot_eager", fullgraph=True)(*given(F64, F32))
    assert caplog.records == []


def test_an_error_over_shapes_is_pytorchs_own() -> None:
    a, b = torch.rand(4, 3, dtype=F64), torch.rand(4, 4)
    with (
        autocast("cpu"),
        pytest.raises(RuntimeError, match=r"a and b must have same reduction dim|cannot be multiplied"),
    ):
        torch.compile(torch.mm, backend="aot_eager", fullgraph=True)(a, b)


def test_the_random_numbers_that_follow_are_those_of_code_that_needs_no_repair() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return nn.functional.rrelu(a, training=True) + nn.functional.dropout(torch.mm(a, b))

    a, b = given(F64, F32)
    drawn = []
    for compiled in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        with autocast("cpu"):
            drawn.append((compiled(a, b), torch.rand(3)))
    torch.testing.assert_close(drawn[1], drawn[0], rtol=0, atol=0)


def test_an_observer_sees_no_call_that_only_tries_something_out() -> None:
    a, b = given(F64, F32)
    with observe("cpu") as seen, autocast("cpu"):
        torch.compile(torch.mm, backend="aot_eager", fullgraph=True)(a, b)
    assert seen.calls
    assert {call.input_dtypes for call in seen.calls} == {("float64", "float64")}


def test_values_under_a_learned_way_are_those_of_the_next_input() -> None:
    compiled = torch.compile(torch.mm, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        a, b = torch.rand(4, 4, dtype=F64), torch.rand(4, 4)
        with autocast("cpu"):
            torch.testing.assert_close(compiled(a, b), a @ b.double(), rtol=1e-12, atol=0)


def test_a_destination_inside_of_an_op_that_is_resized() -> None:
    def function(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return torch.linalg.solve(a, b, out=out)

    a, b = torch.eye(4) * 2, torch.ones(4, dtype=F16)
    with autocast("cpu"):
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(a, b, torch.empty(4))
    torch.testing.assert_close(found, torch.full((4,), 0.5), rtol=0, atol=0)


@pytest.mark.parametrize("function", [torch.linalg.lu_solve, torch.linalg.ldl_solve])
def test_indices_that_count_from_one(function: Callable[..., Tensor]) -> None:
    a, pivots, b = torch.eye(4, dtype=BF16), torch.arange(1, 5, dtype=torch.int32), torch.ones(4, 2, dtype=BF16)
    with autocast("cpu"):
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(a, pivots, b)
        expected = function(a, pivots, b)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.dtype is F32
