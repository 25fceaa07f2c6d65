"""The policy "apex-o1" by Apex's lists: every name in every form, its dtype and its value, in both low dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo import builtin_policy, tables

from .o1_calls import Make
from .o1_checks import (
    BF16,
    F16,
    F32,
    NO_DTYPE,
    ON_COMPARISON,
    ON_THE_RIGHT,
    TOLERANCE,
    cases,
    check,
    low_dtypes,
    region,
    run,
)
from .o1_lists import IN_PLACE, LISTS, NO_ROW, POLICIES, methods

# The lists themselves


def test_the_lists_have_as_many_names_as_apex_had() -> None:
    counts = {key: len(names) for key, names in LISTS.items()}
    assert counts == {
        ("F", "FP16"): 8,
        ("F", "FP32"): 29,
        ("F", "BANNED"): 1,
        ("torch", "FP16"): 17,
        ("torch", "FP32"): 23,
        ("torch", "CASTS"): 16,
        ("torch", "SEQUENCE_CASTS"): 2,
        ("Tensor", "FP16"): 1,
        ("Tensor", "FP32"): 4,
        ("Tensor", "CASTS"): 21,
        ("RNN", "FP16"): 8,
    }
    assert [len(methods(kind)) for kind in ("FP16", "FP32", "CASTS")] == [11, 27, 36]


def test_every_listed_name_has_a_row_and_every_row_says_which_name() -> None:
    listed = {f"{home}.{name}": kind for (home, kind), names in LISTS.items() for name in names}
    named = set()
    for row in tables.read("torch", "apex-o1"):
        if row["apex"].startswith("not listed: "):
            assert row["policy"] == "fallthrough"
            continue
        for source in row["apex"].split("; "):
            kind, name = source.split(" ")
            assert kind in (listed[name], "FP32"), (
                "F's CASTS and torch's FP32 may share an op, never the other way round"
            )
            assert kind == listed[name]
            assert row["policy"] in POLICIES[kind]
            named.add(name)
    assert named.isdisjoint(NO_ROW)
    assert named | set(NO_ROW) == set(listed)


def test_every_row_is_an_op_of_this_pytorch_and_in_order() -> None:
    ops = [row["op"] for row in tables.read("torch", "apex-o1")]
    assert ops == sorted(set(ops))
    assert set(ops) <= set(torch._C._dispatch_get_all_op_names())
    assert builtin_policy("apex-o1").ops == tables.apex_lists()


# FP16


@low_dtypes
@cases("FP16")
def test_the_fp16_list_computes_in_the_low_dtype_whatever_comes(home: str, name: str, low: torch.dtype) -> None:
    expected = run(home, name, F32, F32)
    for first, rest in ((F32, F32), (low, low), (low, F32), (F32, low), (BF16 if low is F16 else F16, F32)):
        with region(low):
            check(run(home, name, first, rest), low, expected)


# FP32


@low_dtypes
@cases("FP32", without=tuple(name.removeprefix("Tensor.") for name in NO_ROW))
def test_the_fp32_list_computes_in_float32_whatever_comes(home: str, name: str, low: torch.dtype) -> None:
    expected = run(home, name, F32, F32)
    for first, rest in ((F32, F32), (low, low), (low, F32), (F32, low), (BF16 if low is F16 else F16, F32)):
        with region(low):
            result = run(home, name, first, rest)
        assert result.dtype is F32
        torch.testing.assert_close(result, expected, **INSIDE_LOW.get(name, {}).get(first, TOLERANCE[F32]))


INSIDE_LOW = {
    name: {low: TOLERANCE[low] for low in (BF16, F16)}
    for name in ("local_response_norm", "multilabel_soft_margin_loss")
}
"""What PyTorch writes in Python: an op on no list computes in the low dtype inside of these, the last one in float32.

local_response_norm squares and averages its input before it calls pow, multilabel_soft_margin_loss calls logsigmoid before
sum. Apex cast the input of the whole function. They are a unit in the last place of the low dtype off for it."""


@low_dtypes
@pytest.mark.parametrize(
    ("mode", "dim", "antialias"),
    [
        *(("nearest", dim, False) for dim in (1, 2, 3)),
        *(("nearest-exact", dim, False) for dim in (1, 2, 3)),
        ("linear", 1, False),
        *((mode, 2, antialias) for mode in ("bilinear", "bicubic") for antialias in (False, True)),
        ("lanczos", 2, True),
        ("trilinear", 3, False),
    ],
)
def test_every_way_to_interpolate_is_in_float32(mode: str, dim: int, antialias: bool, low: torch.dtype) -> None:
    x = Make(low)(1, 2, *[4] * dim)
    with region(low):
        result = F.interpolate(x, scale_factor=2, mode=mode, antialias=antialias)
    check(result, F32, F.interpolate(x.float(), scale_factor=2, mode=mode, antialias=antialias))


@low_dtypes
def test_interpolation_by_area_is_pooling_which_is_on_no_list(low: torch.dtype) -> None:
    """Apex cast the input of `interpolate`, whatever the mode; this one is adaptive_avg_pool2d, on no list."""
    x = Make(low)(1, 2, 4, 4)
    with region(low):
        check(F.interpolate(x, scale_factor=0.5, mode="area"), low, F.avg_pool2d(x.float(), 2))


@low_dtypes
@pytest.mark.parametrize(
    ("p", "dim"),
    [
        *((p, dim) for p in (2, 1, 0, 3, float("inf"), "fro") for dim in (None, (0, 1), 0)),
        *(("nuc", dim) for dim in (None, (0, 1))),
    ],
)
def test_every_norm_is_in_float32(p: Any, dim: Any, low: torch.dtype) -> None:
    x = Make(low)(4, 4)
    for norm in (torch.norm, Tensor.norm):
        with region(low):
            result = norm(x, p, dim)
        # The nuclear norm goes through a decomposition.
        torch.testing.assert_close(result, norm(x.float(), p, dim), rtol=1e-5, atol=1e-6)
        assert result.dtype is F32


@low_dtypes
def test_reductions_over_a_dimension_are_in_float32(low: torch.dtype) -> None:
    x = Make(low)(4, 4)
    for name in ("sum", "prod", "std", "var"):
        with region(low):
            result = getattr(torch, name)(x, 1)
        check(result, F32, getattr(torch, name)(x.float(), 1))
    with region(low):
        assert torch.sum(x, dtype=low).dtype is low, "a dtype that is asked for is given"
        check(torch.std(x, dim=0, correction=0), F32, torch.std(x.float(), dim=0, correction=0))


# CASTS and SEQUENCE_CASTS


@low_dtypes
@cases("CASTS", "SEQUENCE_CASTS", without=IN_PLACE)
def test_the_promote_lists_leave_one_dtype_and_take_two_to_float32(home: str, name: str, low: torch.dtype) -> None:
    # 1 / x is x.reciprocal() times 1, and reciprocal is on the float32 list.
    own = F32 if name in ("__rdiv__", "__rtruediv__") else low
    wanted = torch.bool if name in NO_DTYPE else None
    expected = run(home, name, F32, F32)
    for first, rest, dtype in ((F32, F32, F32), (low, low, own), (low, F32, F32), (F32, low, F32), (BF16, F16, F32)):
        if home == "operator" and name.startswith("__r"):
            rest, dtype = first, own if first is low else F32 if first is F32 or own is F32 else first
        with region(low):
            result = run(home, name, first, rest)
        check(result, wanted or dtype, expected)


@low_dtypes
@cases("CASTS", without=(*IN_PLACE, "cross", "bilinear", "dot", "equal", *ON_THE_RIGHT))
def test_a_number_in_a_float32_tensor_counts_as_float32(home: str, name: str, low: torch.dtype) -> None:
    """By PyTorch's own rules a tensor without dimensions does not, and the result would be low."""
    with region(low):
        result = run(home, name, low, F32, zero_dim=True)
    check(result, torch.bool if name in NO_DTYPE else F32, run(home, name, F32, F32, zero_dim=True))
    if name not in NO_DTYPE:
        assert run(home, name, low, F32, zero_dim=True).dtype is low, "else this test shows nothing"


@low_dtypes
@pytest.mark.parametrize("name", ON_THE_RIGHT)
def test_a_number_in_a_float32_tensor_counts_on_the_left_too(name: str, low: torch.dtype) -> None:
    x, number = Make(low)(4, 4), torch.tensor(0.3)
    with region(low):
        result = getattr(Tensor, name)(x, number)
    check(result, F32, getattr(Tensor, name)(x.float(), number))


@low_dtypes
@pytest.mark.parametrize("name", sorted(ON_COMPARISON))
def test_a_comparison_with_a_number_in_a_float32_tensor_is_made_in_float32(name: str, low: torch.dtype) -> None:
    """0.3 is no low number: next to it the low one is off, and PyTorch by itself takes the two for equal."""
    number = torch.tensor(0.3)
    x = number.to(low).repeat(2)
    home = Tensor if name.startswith("__") else torch
    with region(low):
        found = getattr(home, name)(x, number)
    assert torch.equal(found, getattr(home, name)(x.float(), number))
    assert torch.eq(x, number).all(), "else this test shows nothing"
