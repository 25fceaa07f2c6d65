"""What the policy "apex-o1" does where Apex raised, or where no rule can stand for a name: in place, float64, the ban."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo import BannedOpError, builtin_policy
from mezzo.torch import autocast

from .o1_calls import TORCH, Make
from .o1_checks import F32, F64, NO_DTYPE, ON_THE_RIGHT, cases, check, low_dtypes, region, run
from .o1_lists import IN_PLACE

# In place


@low_dtypes
def test_writes_in_place_keep_the_dtype_of_the_tensor(low: torch.dtype) -> None:
    """Of the operators, and of the in-place forms of listed functions: what is added to a tensor takes its dtype."""
    for first, rest in ((low, F32), (F32, low), (low, low)):
        for name in IN_PLACE:
            x, y = Make(first)(4, 4), Make(rest, seed=1)(4, 4)
            expected = getattr(x.float(), name)(y.float())
            with region(low):
                result = getattr(x, name)(y)
            assert result is x
            check(x, first, expected)


MATCH_SELF = (
    "addmm_ addmv_ addr_ addbmm_ baddbmm_ addcdiv_ addcmul_ atan2_ add_ div_ mul_ eq_ ge_ gt_ le_ lt_ ne_"
).split()


@low_dtypes
@pytest.mark.parametrize("name", MATCH_SELF)
def test_the_in_place_form_of_a_listed_method_matches_the_tensor(name: str, low: torch.dtype) -> None:
    for first, rest in ((low, F32), (F32, low), (low, low)):
        x, *others = TORCH[name[:-1]](Make(first), Make(rest, seed=1))
        same = [other.to(first) for other in others]
        expected = getattr(x.clone(), name)(*same)
        with region(low):
            result = getattr(x, name)(*others)
        assert result is x
        # Where PyTorch computes with the float32 tensor as it came, the result is closer to the truth.
        check(x, first, expected)


ON_FP32_LIST = "acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_ erfinv_".split()


@low_dtypes
@pytest.mark.parametrize("name", ON_FP32_LIST)
def test_the_in_place_form_of_the_fp32_list_runs_in_the_dtype_of_the_tensor(name: str, low: torch.dtype) -> None:
    """Apex raised for a low tensor. A rule cannot see dtypes; the result is the rounded one, as without autocast."""
    x = Make(low)(4, 4)
    expected = getattr(x.clone(), name)()
    with region(low):
        assert torch.equal(getattr(x, name)(), expected)


@low_dtypes
def test_names_that_no_rule_can_stand_for_do_what_pytorch_does(low: torch.dtype) -> None:
    x = Make(low)(4, 4)
    with region(low):
        assert x.cpu() is x
        before = x
        x **= 2
        assert x is before
        assert x.dtype is low


# BANNED


@low_dtypes
def test_binary_cross_entropy_is_banned_with_advice_and_the_ban_can_be_lifted(low: torch.dtype) -> None:
    x, y = Make(low)(4), Make(low, seed=1)(4)
    for inputs in ((x, y), (x.float(), y), (x, y.float())):
        with (
            region(low),
            pytest.raises(BannedOpError, match=r"(?s)Give it float32 inputs, .*binary_cross_entropy_with_logits"),
        ):
            F.binary_cross_entropy(*inputs)
    with region(low):
        # As in Apex: what is float32 already is safe.
        check(F.binary_cross_entropy(x.float(), y.float()), F32, F.binary_cross_entropy(x.float(), y.float()))
    lifted = builtin_policy("apex-o1").override({"binary_cross_entropy": "fp32"})
    with autocast("cpu", dtype=low, policy=lifted):
        check(F.binary_cross_entropy(x, y), F32, F.binary_cross_entropy(x.float(), y.float()))


# float64


@low_dtypes
@cases("FP16", "FP32", "CASTS", "SEQUENCE_CASTS", without=(*IN_PLACE, "__ipow__", "cpu"))
def test_float64_is_never_cast(home: str, name: str, low: torch.dtype) -> None:
    """Apex cast it down, and raised where float64 met float32."""
    expected = run(home, name, F64, F64)
    with region(low):
        result = run(home, name, F64, F64)
    if isinstance(expected, Tensor):
        assert torch.equal(result, expected)
        assert result.dtype is expected.dtype
    else:
        assert result is expected


@low_dtypes
@cases("CASTS", "SEQUENCE_CASTS", without=(*IN_PLACE, *ON_THE_RIGHT))
def test_float64_and_another_dtype_promote_to_float64(home: str, name: str, low: torch.dtype) -> None:
    expected = run(home, name, F64, F64)
    for other in (F32, low):
        with region(low):
            result = run(home, name, F64, other)
        check(result, torch.bool if name in NO_DTYPE else F64, expected)
