"""Where repairs are in force, what a repaired call leaves as it was, and what they do not touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mezzo
from mezzo import Policy
from mezzo.torch import autocast, set_default_policy
from mezzo.torch.kernels import installed_kernels

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
lows = pytest.mark.parametrize("low", [BF16, F16], ids=str)
A, B = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0)).unbind()
ROWS = torch.arange(4)


def mixed() -> Tensor:
    """Make a call that works only if it is repaired."""
    return torch.index_add(A.bfloat16(), 0, ROWS, B)


def is_repaired() -> bool:
    try:
        return mixed().dtype is F32
    except RuntimeError as error:
        if "scalar type" not in str(error):
            raise
        return False


# By policy

STRICT = Policy("strict", {"softmax": "fp32"}, default="device", repairs=False)


@pytest.mark.parametrize(
    ("policy", "repairs"),
    [
        (None, True),
        ("default", True),
        ("unified", True),
        ("fp32", True),
        (Policy("mine", {"softmax": "fp32"}, default="device"), True),
        (Policy("mine", {"index_add": "promote"}), True),
        ("torch", False),
        (Policy.from_table("cpu"), False),
        (STRICT, False),
        (STRICT.override({"gelu": "fp32"}), False),
        (mezzo.builtin_policy("default").override({"gelu": "fp32"}), True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_policy_says_whether_there_are_repairs(policy: Any, repairs: bool) -> None:
    with autocast("cpu", policy=policy):
        assert is_repaired() is repairs
    assert not is_repaired()


@pytest.mark.parametrize("base", ["default", "torch"])
@pytest.mark.parametrize("key", [True, False, None])
def test_the_key_in_a_file(tmp_path: Path, base: str, key: bool | None) -> None:
    line = "" if key is None else f"repairs = {str(key).lower()}\n"
    path = tmp_path / "policy.toml"
    path.write_text(f'name = "file"\nbase = "{base}"\n{line}', encoding="utf-8")
    wanted = base == "default" if key is None else key
    with autocast("cpu", policy=str(path)):
        assert is_repaired() is wanted
    saved = tmp_path / "saved.toml"
    Policy.load(path).save(saved)
    assert Policy.load(saved).repairs is wanted


def test_the_inner_region_says_whether_there_are_repairs() -> None:
    with autocast("cpu"):
        with autocast("cpu", policy="torch"):
            assert not is_repaired()
            with autocast("cpu", policy="default"):
                assert is_repaired()
            assert not is_repaired()
        assert is_repaired()
        with autocast("cpu", enabled=False):
            assert not is_repaired()
        assert is_repaired()


# Plain regions


def test_plain_regions_are_repaired_once_the_default_policy_is_set() -> None:
    with torch.autocast("cpu"):
        assert not is_repaired()
        set_default_policy("default")
        try:
            assert is_repaired()
            with torch.autocast("cpu", enabled=False):
                assert not is_repaired()
            with autocast("cpu", policy="torch"):
                assert not is_repaired()
            assert is_repaired()
        finally:
            set_default_policy(None)
        assert not is_repaired()


def test_a_plain_region_in_one_of_mezzos_has_its_policy() -> None:
    with autocast("cpu"), torch.autocast("cpu"):
        assert is_repaired()
    with autocast("cpu", policy="torch"), torch.autocast("cpu"):
        assert not is_repaired()


def test_regions_of_the_default_policy_put_no_kernel_in_pytorchs_place() -> None:
    before = installed_kernels("cpu")
    with autocast("cpu"):
        assert is_repaired()
        nn.LSTM(4, 4)(A)
        F.conv2d(A[None, None], B[None, None])
    assert installed_kernels("cpu") == before


# Errors

ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "shapes": (lambda: torch.mm(A, B[:2].bfloat16()), "mat1 and mat2 shapes cannot be multiplied"),
    "shapes, float64": (lambda: torch.mm(A, B[:2].double()), "mat1 and mat2 shapes cannot be multiplied"),
    "index": (lambda: torch.index_add(A, 0, ROWS + 1, B.double()), "index out of range|out of bounds"),
    "cat": (lambda: torch.cat([A, B[:, :2].half()]), "Sizes of tensors must match"),
    "singular": (lambda: torch.linalg.inv(torch.zeros(2, 2, dtype=F64)), "singular"),
    "integers": (lambda: torch.mm(ROWS[None], ROWS[:, None].float()), "Long|same dtype"),
}


@pytest.mark.parametrize(("call", "text"), ERRORS.values(), ids=ERRORS)
def test_an_error_that_is_not_about_dtypes_keeps_its_text(call: Callable[[], Any], text: str) -> None:
    with autocast("cpu"), pytest.raises(RuntimeError, match=text):
        call()


def test_an_error_that_nothing_mends_is_pytorchs_own() -> None:
    def call() -> Tensor:
        return torch.index_add(ROWS, 0, ROWS, A[0])

    with torch.autocast("cpu"), pytest.raises(RuntimeError) as theirs:
        call()
    with autocast("cpu"), pytest.raises(RuntimeError) as ours:
        call()
    assert str(ours.value) == str(theirs.value)


@lows
def test_a_failed_repair_changes_nothing(low: torch.dtype) -> None:
    destination, source = A.to(low).clone(), B[:, :2].double()
    before, version = destination.clone(), destination._version
    norm = nn.BatchNorm1d(4).to(low)
    state = {name: value.clone() for name, value in norm.state_dict().items()}
    with autocast("cpu", dtype=low):
        with pytest.raises(RuntimeError):
            destination.index_add_(0, ROWS + 1, source)
        with pytest.raises(RuntimeError):
            destination.addmm_(source, source)
        with pytest.raises(RuntimeError):
            F.batch_norm(A[:, :2], norm.running_mean, norm.running_var, training=True)
        assert is_repaired()
    assert torch.equal(destination, before)
    assert destination._version == version
    for name, value in state.items():
        assert torch.equal(norm.state_dict()[name], value)


# Gradients

DIFFERENTIATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": torch.mm,
    "linear": F.linear,
    "index_add": lambda a, b: torch.index_add(a, 0, ROWS, b),
    "scatter_add": lambda a, b: torch.scatter_add(a, 0, ROWS.expand(4, 4), b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "mv": lambda a, b: torch.mv(a, b[0]),
    "cat": lambda a, b: torch.cat([a, b]),
    "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 4, 4, dtype=a.dtype)),
    "layer_norm": lambda a, b: F.layer_norm(a, (4,), b[0], b[1]),
    "index_put_": lambda a, b: (a * 1).index_put_((ROWS,), b, accumulate=True),
    "addmm_": lambda a, b: (a * 1).addmm_(b, b),
    "inv": lambda a, b: torch.linalg.inv(a + 4 * torch.eye(4, dtype=a.dtype)) + b,
    "pdist": lambda a, b: torch.pdist(a) * b.sum(),
}


@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, F16), (F64, F32), (F32, F64), (BF16, F16)], ids=str)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_have_the_dtypes_that_came(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor, dtype in zip((A, B), dtypes, strict=True)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with autocast("cpu"):
        result = DIFFERENTIATED[name](*leaves)
    reference = DIFFERENTIATED[name](*exact)
    result.double().square().sum().backward()
    reference.square().sum().backward()
    for leaf, wanted in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype is leaf.dtype
        scale = max(1.0, wanted.grad.abs().max().item())
        # Forward and backward may both run in bfloat16: some roundings to 8 bits.
        torch.testing.assert_close(leaf.grad.double() / scale, wanted.grad / scale, rtol=0, atol=2**-5)


# State, and numbers


@lows
@pytest.mark.parametrize("given", [F32, F64, BF16, F16], ids=str)
@pytest.mark.parametrize("own", [F32, F64, BF16, F16], ids=str)
def test_batch_norm_updates_statistics_of_any_dtype(own: torch.dtype, given: torch.dtype, low: torch.dtype) -> None:
    norm, reference = nn.BatchNorm1d(4).to(own), nn.BatchNorm1d(4).double()
    statistics = norm.running_mean
    with autocast("cpu", dtype=low):
        result = norm(A.to(given))
    wanted = reference(A.double())
    assert norm.running_mean is statistics
    assert statistics.dtype is own
    assert int(norm.num_batches_tracked) == 1
    tolerance = 4 * max(torch.finfo(own).eps, torch.finfo(given).eps)
    torch.testing.assert_close(norm.running_mean.double(), reference.running_mean, rtol=0, atol=tolerance)
    torch.testing.assert_close(norm.running_var.double(), reference.running_var, rtol=0, atol=tolerance)
    # The slope of a normalization is the reciprocal of the spread, here about four.
    torch.testing.assert_close(result.double(), wanted, rtol=0, atol=8 * tolerance)


@lows
def test_numbers_in_the_place_of_tensors(low: torch.dtype) -> None:
    zero_d = torch.tensor(0.5, dtype=F64)
    with autocast("cpu", dtype=low):
        results = [
            torch.lerp(A.to(low), B, 0.5),
            torch.lerp(A.to(low), B, zero_d),
            torch.index_put(A.to(low), (ROWS,), zero_d),
            torch.where(A > 0.5, A.to(low), 0.5),
            torch.heaviside(A.to(low), zero_d),
            A.to(low).index_fill(0, ROWS, 0.5),
            torch.ops.aten.mul(A, 2.0),
        ]
    assert all(isinstance(result, Tensor) for result in results)
    torch.testing.assert_close(results[0].double(), (A.to(low).double() + B.double()) / 2, rtol=0, atol=2**-20)
    assert torch.equal(results[2].double(), torch.full((4, 4), 0.5, dtype=F64))
    assert torch.equal(results[6], 2 * A)


# The ban


@contextmanager
def cuda_region(policy: Any) -> Iterator[None]:
    """Open a region for CUDA where there may be none; the region puts the state back."""
    with FakeTensorMode(), torch.no_grad(), autocast("cuda", F16, enabled=False, policy=policy):
        torch.set_autocast_enabled("cuda", True)
        yield


def on_cuda(dtype: torch.dtype) -> Tensor:
    return torch.empty(4, 4, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [F32, F16, F64], ids=str)
def test_binary_cross_entropy_stays_banned_on_cuda(dtype: torch.dtype) -> None:
    with cuda_region("default"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(on_cuda(dtype), on_cuda(F32))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_an_override_lifts_the_ban(dtype: torch.dtype) -> None:
    lifted = mezzo.builtin_policy("default").override({"binary_cross_entropy": "fp32"})
    with cuda_region(lifted):
        assert F.binary_cross_entropy(on_cuda(dtype), on_cuda(F32)).dtype is F32


@lows
def test_there_is_no_ban_on_the_cpu(low: torch.dtype) -> None:
    with autocast("cpu", dtype=low):
        results = [F.binary_cross_entropy(A.to(dtype), B) for dtype in (F32, low, F64)]
    assert [result.dtype for result in results] == [F32, F32, F64]
