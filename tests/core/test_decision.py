"""The pure decision: what each cast policy does to each dtype."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo import CastPolicy, PolicyError, input_dtypes
from mezzo.decision import LOW_DTYPES, eligible, parse_cast_policy, widest

DTYPES = ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int64", "bool", "complex64"]
dtype_lists = st.lists(st.sampled_from(DTYPES), max_size=6)
lows = st.sampled_from(LOW_DTYPES)


@pytest.mark.parametrize("dtype", ["float64", "int64", "int8", "bool", "complex64", "complex128"])
def test_float64_and_what_is_not_floating_is_never_cast(dtype: str) -> None:
    assert not eligible(dtype)
    for policy in CastPolicy:
        assert input_dtypes(policy, [dtype, "float32"], "bfloat16")[0] == dtype


@pytest.mark.parametrize(
    ("policy", "came", "low", "reached"),
    [
        ("lower_precision_fp", ["float32", "float16", "bfloat16"], "bfloat16", ["bfloat16"] * 3),
        ("lower_precision_fp", ["float8_e4m3fn"], "float16", ["float16"]),
        ("fp32", ["float16", "bfloat16", "float32"], "float16", ["float32"] * 3),
        ("fp32_set_opt_dtype", ["bfloat16"], "bfloat16", ["bfloat16"]),
        ("fp32_append_dtype", ["float16"], "bfloat16", ["float16"]),
        ("promote", ["bfloat16", "bfloat16"], "bfloat16", ["bfloat16"] * 2),
        ("promote", ["bfloat16", "float32"], "bfloat16", ["float32"] * 2),
        ("promote", ["float16", "bfloat16"], "bfloat16", ["float32"] * 2),
        ("promote", ["float16", "float16"], "bfloat16", ["float16"] * 2),
        ("promote", ["float64", "bfloat16"], "bfloat16", ["float64", "bfloat16"]),
        ("promote", ["float8_e4m3fn", "float8_e5m2"], "bfloat16", ["bfloat16"] * 2),
        ("promote", ["int64", "float16"], "bfloat16", ["int64", "float16"]),
        ("fallthrough", ["float32", "float16"], "bfloat16", ["float32", "float16"]),
        ("opaque", ["float32"], "bfloat16", ["float32"]),
        ("banned", ["float32"], "bfloat16", ["float32"]),
        ("banned_lower_precision", ["float32", "float16"], "bfloat16", ["float32", "float16"]),
    ],
)
def test_the_dtypes_that_reach_an_op(policy: str, came: list[str], low: str, reached: list[str]) -> None:
    assert input_dtypes(CastPolicy(policy), came, low) == tuple(reached)


@given(dtype_lists, lows)
def test_promotion_does_not_depend_on_the_order_of_arguments(dtypes: list[str], low: str) -> None:
    assert widest(dtypes, low) == widest(dtypes[::-1], low) == widest(sorted(dtypes), low)


@given(st.sampled_from(CastPolicy), dtype_lists, lows)
def test_deciding_twice_changes_nothing_more(policy: CastPolicy, dtypes: list[str], low: str) -> None:
    once = input_dtypes(policy, dtypes, low)
    assert input_dtypes(policy, once, low) == once
    assert len(once) == len(dtypes)


@given(dtype_lists, lows)
def test_casting_policies_leave_one_eligible_dtype(dtypes: list[str], low: str) -> None:
    for policy in (CastPolicy.LOWER_PRECISION_FP, CastPolicy.FP32, CastPolicy.PROMOTE):
        assert len({dtype for dtype in input_dtypes(policy, dtypes, low) if eligible(dtype)}) <= 1


def test_a_word_that_is_no_cast_policy_is_refused_with_near_words() -> None:
    with pytest.raises(PolicyError) as caught:
        parse_cast_policy("promot")
    assert str(caught.value) == (
        "'promot' is not a cast policy; allowed are lower_precision_fp, fp32, fp32_set_opt_dtype, fp32_append_dtype, "
        "promote, banned, banned_lower_precision, fallthrough, opaque. Did you mean 'promote'?"
    )


def test_a_value_that_is_no_string_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"^32 is not a cast policy; allowed are"):
        parse_cast_policy(32)
