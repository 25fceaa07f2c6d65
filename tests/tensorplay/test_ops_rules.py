"""Op by op over the tables: the dtype of the result under each rule, and its numbers against float32."""

from __future__ import annotations

from typing import Any

import pytest
import tensorplay

import mezzo.tensorplay as mt
from mezzo import BannedOpError
from mezzo.builtin import builtin_policy
from tests.tensorplay.op_calls import CALLS
from tests.tensorplay.op_runs import HALVES, NO_KERNEL, ROUNDING, distance, dtype_names, lacks, run, tensor_count

POLICIES = {
    "default": builtin_policy("cpu", framework="tensorplay"),
    "unified": builtin_policy("unified", framework="tensorplay"),
}
"""Policy to the rules that it has on the CPU."""

ROUNDINGS = {"matrix_power": 24, "linalg_matrix_power": 24, "gru": 24, "gru_cell": 24, "corrcoef": 24, "cov": 24}
"""Ops with several products one after the other: how many roundings of the low dtype their result may be away."""

NOT_FLOAT = {"fft_irfft", "fft_irfft2"}
"""Ops whose sample has no float tensor."""

FIRST_ALONE = {
    "_ctc_loss": "its second result has places that are not filled",
    "linalg_qr": "the lower triangle of its second result is memory that was not filled, in this release",
}
"""Ops of which only the first result is compared."""

WIDE_RESULT = {"vdot"}
"""Promoting ops whose kernel for low inputs gives float32."""


def rows(rule: str) -> list[tuple[str, str]]:
    """List the ops with a rule in a policy, each with the policy."""
    chosen = [
        (name, op)
        for name, policy in POLICIES.items()
        for op in policy.ops
        if policy.rule_of(op, "bfloat16").value == rule
    ]
    return sorted((name, op) for name, op in chosen if op not in NO_KERNEL and op not in NOT_FLOAT)


def complex_names(names: list[str]) -> list[str]:
    """Name the real dtypes of numbers."""
    return [name.replace("complex64", "float32").replace("complex128", "float64") for name in names]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize(("policy", "op"), rows("lower_precision_fp"))
def test_a_lower_precision_op_runs_in_the_regions_dtype(policy: str, op: str, half: Any) -> None:
    name = str(half).split(".")[-1]
    wanted = "float32" if lacks(op, name) else name
    plain = run(op, [tensorplay.float32])
    for dtypes in ([tensorplay.float32], [half], [half, tensorplay.float32]):
        found = run(op, dtypes, mt.autocast("cpu", dtype=half, policy=policy))
        assert set(dtype_names(found)) == {wanted}
        for mine, right in zip(found, plain, strict=True):
            # The samples are exact in bfloat16: what is off comes from rounding the result, and inner ones on the way.
            assert distance(mine, right) <= ROUNDINGS.get(op, 6) * ROUNDING[wanted]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize(("policy", "op"), rows("fp32"))
def test_a_float32_op_takes_low_inputs_in_float32(policy: str, op: str, half: Any) -> None:
    rounded = run(op, [half], mt.autocast("cpu", dtype=half, policy=policy))
    wide = run(op, [tensorplay.float32], mt.autocast("cpu", dtype=half, policy=policy))
    assert set(complex_names(dtype_names(rounded))) <= {"float32"}
    plain = run(op, [tensorplay.float32])
    assert dtype_names(wide) == dtype_names(plain)
    count = 1 if op in FIRST_ALONE else len(plain)
    for mine, right in zip(wide[:count], plain[:count], strict=True):
        assert distance(mine, right) <= 8 * ROUNDING["float32"]
    for mine, right in zip(rounded[:count], plain[:count], strict=True):
        # What float32 gives for the rounded inputs, so off by what these are: amplified by the condition of the op.
        assert distance(mine, right) <= 16 * ROUNDING[str(half).split(".")[-1]]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize(("policy", "op"), rows("promote"))
def test_a_promoting_op_runs_in_the_widest_dtype(policy: str, op: str, half: Any) -> None:
    name = str(half).split(".")[-1]
    plain = run(op, [tensorplay.float32])[0]
    same = "float32" if lacks(op, name) or op in WIDE_RESULT else name
    cases = [([tensorplay.float32], "float32"), ([half], same), ([half, tensorplay.float32], "float32")]
    if tensor_count(op) > 1:
        cases.append(([tensorplay.float32, half], "float32"))
    for dtypes, wanted in cases:
        found = run(op, dtypes, mt.autocast("cpu", dtype=half, policy=policy))
        assert dtype_names(found[:1]) == [wanted]
        assert distance(found[0], plain) <= 8 * ROUNDING[name]


@pytest.mark.parametrize(("policy", "op"), rows("banned"))
def test_a_banned_op_raises(policy: str, op: str) -> None:
    with pytest.raises(BannedOpError, match=op):
        run(op, [tensorplay.bfloat16], mt.autocast("cpu", policy=policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_there_is_a_sample_call_for_each_op_of_the_tables(policy: str) -> None:
    assert {*POLICIES[policy].ops} <= {*CALLS}
