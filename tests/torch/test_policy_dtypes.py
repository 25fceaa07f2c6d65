"""What the policies "unified" and "fp32" cast on the CPU, where mezzo's kernels serve what PyTorch does not list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mezzo.torch
from mezzo.errors import BannedOpError
from mezzo.policy import Policy

LOW = (torch.bfloat16, torch.float16)
OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
F32, F64, F8, I64 = torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64

low_dtypes = pytest.mark.parametrize("low", LOW, ids=str)


def x(dtype: torch.dtype = F32, seed: int = 0, shape: tuple[int, ...] = (3, 3)) -> Tensor:
    """Give numbers between 0 and 1, the same for each dtype up to rounding."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(dtype: torch.dtype = I64) -> Tensor:
    return torch.arange(9).reshape(3, 3).to(dtype)


def v(dtype: torch.dtype = F32) -> Tensor:
    return x(dtype, 5, (3,))


Case = tuple[Callable[[torch.dtype], Tensor], "torch.dtype | str"]

# A call, given the region's dtype, and the dtype of its result: "low" is the region's, "other" the second low one.
UNIFIED: dict[str, Case] = {
    "lower precision": (lambda low: torch.mv(x(), v()), "low"),
    "lower precision of the other low dtype": (lambda low: torch.mv(x(OTHER[low]), v(low)), "low"),
    "lower precision of float8": (lambda low: torch.mv(x(F8), v()), "low"),
    "lower precision leaves float64": (lambda low: torch.mv(x(F64), v(F64)), F64),
    "lower precision leaves integers": (lambda low: torch.mv(whole(), whole()[0]), I64),
    "lower precision leaves complex": (lambda low: torch.mv(x(torch.complex64), v(torch.complex64)), torch.complex64),
    "lower precision of a tensor list": (lambda low: torch.linalg.multi_dot([x(), x(low), x(OTHER[low])]), "low"),
    "lower precision into out=": (lambda low: torch.mv(x(), v(), out=torch.empty(3)), F32),
    "lower precision in place": (lambda low: v().addmv_(x(), v()), F32),
    "fp32": (lambda low: torch.exp(x(low)), F32),
    "fp32 leaves float64": (lambda low: torch.exp(x(F64)), F64),
    "fp32 in place": (lambda low: x(low).exp_(), "low"),
    "fp32 into out=": (lambda low: torch.exp(x(low), out=torch.empty(3, 3, dtype=low)), "low"),
    "fp32 beside float64": (lambda low: torch.pow(x(F64), x(low)), F64),
    "fp32 of an optional tensor": (lambda low: F.layer_norm(x(low), (3,), v(), v(low)), F32),
    "set dtype": (lambda low: x(low).sum(), F32),
    "set dtype over a dimension": (lambda low: x(low).sum(1, keepdim=True), F32),
    "set dtype of softmax": (lambda low: x(low).softmax(-1), F32),
    "set dtype of float8's neighbours": (lambda low: x(OTHER[low]).cumsum(0), F32),
    "set dtype leaves float64": (lambda low: x(F64).sum(), F64),
    "set dtype leaves softmax of float64": (lambda low: x(F64).log_softmax(-1), F64),
    "set dtype leaves integers": (lambda low: whole(torch.int32).sum(), I64),
    "set dtype leaves booleans": (lambda low: whole(torch.bool).prod(), I64),
    "set dtype leaves a dtype that is given": (lambda low: x().sum(dtype=low), "low"),
    "set dtype leaves a given dtype of softmax": (lambda low: x().softmax(-1, dtype=low), "low"),
    "set dtype leaves a given dtype by place": (lambda low: torch.log_softmax(x(low), -1, F64), F64),
    "set dtype leaves a given float64": (lambda low: x(low).cumsum(0, dtype=F64), F64),
    "set dtype into out=": (lambda low: torch.sum(x(low), 0, out=torch.empty(3, dtype=low)), "low"),
    "append dtype": (lambda low: torch.ops.aten.norm(x(low), 2.0), F32),
    "append dtype over a dimension": (lambda low: torch.ops.aten.norm(x(low), 2.0, [1]), F32),
    "append dtype leaves float64": (lambda low: torch.ops.aten.norm(x(F64), 2.0), F64),
    "append dtype leaves one that is given": (lambda low: torch.ops.aten.norm(x(), 2.0, dtype=F64), F64),
    "promote": (lambda low: torch.dot(v(low), v()), F32),
    "promote of one dtype": (lambda low: torch.dot(v(low), v(low)), "low"),
    "promote of the other low dtype": (lambda low: torch.dot(v(OTHER[low]), v(OTHER[low])), "other"),
    "promote leaves integers": (lambda low: torch.cross(whole(), whole(), dim=-1), I64),
    "promote of an optional tensor": (lambda low: F.bilinear(x(low), x(low), x(low, 1, (2, 3, 3)), v()[:2]), F32),
    "a listed composite's insides": (lambda low: torch.tensordot(x(), x(), dims=1), F32),
    "unlisted": (lambda low: x(low).relu(), "low"),
}

FP32: dict[str, Case] = {
    "what was lower precision": (lambda low: torch.mm(x(low), x(OTHER[low])), F32),
    "linear": (lambda low: F.linear(x(low), x(low), v(low)), F32),
    "float8": (lambda low: torch.mm(x(F8), x(low)), F32),
    "a tensor list": (lambda low: torch.stack([x(low), x(low)]), F32),
    "what set a dtype": (lambda low: x(low).sum(), F32),
    "a dtype that is given": (lambda low: x().sum(dtype=low), "low"),
    "float64": (lambda low: torch.mm(x(F64), x(F64)), F64),
    "integers": (lambda low: torch.mm(whole(), whole()), I64),
    "out=": (lambda low: torch.mm(x(low), x(low), out=torch.empty(3, 3, dtype=low)), "low"),
    "what was banned": (lambda low: F.binary_cross_entropy(x(low), x()), F32),
    "unlisted": (lambda low: x(low).relu(), "low"),
}

ALL = [("unified", case) for case in UNIFIED] + [("fp32", case) for case in FP32]


@low_dtypes
@pytest.mark.parametrize(("policy", "case"), ALL)
def test_a_call_gives_the_dtype_that_the_policy_says(policy, case, low):
    call, stated = {"unified": UNIFIED, "fp32": FP32}[policy][case]
    with mezzo.torch.autocast("cpu", dtype=low, policy=policy):
        found = call(low).dtype
    assert found == {"low": low, "other": OTHER[low]}.get(str(stated), stated)


@low_dtypes
def test_lower_precision_rounds_the_inputs_and_not_the_result(low):
    with mezzo.torch.autocast("cpu", dtype=low, policy="unified"):
        found = torch.mv(x(), v())
    assert torch.equal(found, torch.mv(x(low), v(low)))


@low_dtypes
def test_a_dtype_is_set_and_the_input_is_not_cast_before(low):
    # 300 halves: the sum 150 is beyond the integers that bfloat16 holds in steps of one half, and float32 has no error.
    halves = torch.full((301,), 0.5, dtype=low)
    with mezzo.torch.autocast("cpu", dtype=low, policy="unified"):
        assert halves.sum().item() == 150.5


@low_dtypes
def test_a_tensor_that_comes_by_keyword_is_cast_too(low):
    policy = Policy("mine", {"aten::histogram.bin_ct": "fp32"})
    with mezzo.torch.autocast("cpu", dtype=low, policy=policy):
        found = torch.histogram(x(low), 4, weight=x(low, 1))
    expected = torch.histogram(x(low).float(), 4, weight=x(low, 1).float())
    assert found.hist.dtype == found.bin_edges.dtype == F32
    assert torch.equal(found.hist, expected.hist)


# Promotion

PROMOTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross": lambda one, two: torch.cross(one, two, dim=-1),
    "addcmul": lambda one, two: torch.addcmul(one, two, two),
    "index_put": lambda one, two: torch.index_put(one, (torch.tensor([0, 2]),), two[:2]),
    "tensordot": lambda one, two: torch.tensordot(one, two, dims=1),
    "atan2": torch.atan2,
}
"""Ops that mezzo promotes on a CPU. cat, stack and index_copy are left to PyTorch's kernel, whose rule is the same."""


@low_dtypes
@pytest.mark.parametrize("op", PROMOTED)
def test_promotion_does_not_depend_on_the_order_of_the_arguments(op, low):
    other = OTHER[low]
    pairs = [(low, F32), (F32, low), (other, F32), (F32, other), (low, other), (other, low)]
    with mezzo.torch.autocast("cpu", dtype=low, policy="unified"):
        for one, two in pairs:
            found = PROMOTED[op](x(one), x(two, 1))
            assert found.dtype == F32
            with mezzo.torch.autocast("cpu", enabled=False):
                assert torch.equal(found, PROMOTED[op](x(one).float(), x(two, 1).float()))
        assert PROMOTED[op](x(other), x(other, 1)).dtype == other


@low_dtypes
def test_promotion_ignores_float64_and_leaves_it_to_the_op(low):
    with mezzo.torch.autocast("cpu", dtype=low, policy="unified"):
        assert torch.addcmul(x(F64), x(low), x()).dtype == F64
        assert torch.addcmul(x(low), x(F64), x(low)).dtype == F64


# Bans

UNSAFE = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)


@low_dtypes
@pytest.mark.parametrize("dtype", [F32, F64, torch.float16], ids=str)
def test_binary_cross_entropy_is_banned_with_pytorchs_words(dtype, low):
    with mezzo.torch.autocast("cpu", dtype=low, policy="unified"):
        for loss in (F.binary_cross_entropy, torch.nn.BCELoss()):
            with pytest.raises(RuntimeError) as caught:
                loss(x(dtype), x(dtype, 1))
            assert isinstance(caught.value, BannedOpError)
            assert str(caught.value) == UNSAFE
        assert F.binary_cross_entropy_with_logits(x(dtype), x(dtype, 1)).dtype == (F64 if dtype == F64 else F32)


@low_dtypes
def test_a_ban_ends_in_a_disabled_region_and_does_not_disturb_the_one_around_it(low):
    with mezzo.torch.autocast("cpu", dtype=low, policy="unified"):
        with mezzo.torch.autocast("cpu", enabled=False):
            assert F.binary_cross_entropy(x(), x(F32, 1)).dtype == F32
        with pytest.raises(BannedOpError):
            F.binary_cross_entropy(x(), x(F32, 1))
        assert torch.is_autocast_enabled("cpu")
        assert torch.mv(x(), v()).dtype == low


@low_dtypes
def test_binary_cross_entropy_is_allowed_where_pytorch_allows_it(low):
    with mezzo.torch.autocast("cpu", dtype=low, policy="torch"):
        assert F.binary_cross_entropy(x(low), x(low, 1)).dtype == F32


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_banned_lower_precision_lets_wide_inputs_through(low: torch.dtype) -> None:
    """In a list and as a keyword too; what is written to is an input."""
    policy = Policy(
        "careful",
        {"exp": "banned_lower_precision", "stack": "banned_lower_precision", "exp_": "banned_lower_precision"},
    )
    wide, narrow = torch.ones(2), torch.ones(2, dtype=low)
    with mezzo.torch.autocast("cpu", dtype=low, policy=policy):
        for good in (wide, wide.double(), torch.ones(2, dtype=torch.int64)):
            assert torch.equal(torch.exp(good), torch.exp(good.clone()))
            assert torch.stack([good, good]).dtype is good.dtype
        for call in (
            lambda: torch.exp(narrow),
            lambda: torch.stack([wide, narrow]),
            lambda: torch.stack(tensors=[narrow, wide]),
            narrow.exp_,
        ):
            with pytest.raises(BannedOpError, match=r"got an input in lower precision, .*'careful' bans.*'fp32'"):
                call()
    assert torch.equal(narrow, torch.ones(2, dtype=low))
