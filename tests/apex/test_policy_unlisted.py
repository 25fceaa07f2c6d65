"""What is on no list of Apex's runs in the dtypes that come in, and so do the ops inside of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo import CastPolicy, Policy, builtin_policy, tables
from mezzo.torch import autocast

from .o1_calls import Make

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
low_dtypes = pytest.mark.parametrize("low", [BF16, F16], ids=str)
Call = Callable[[Make], Tensor]


def region(low: torch.dtype, policy: str | Policy = "apex-o1") -> autocast:
    return autocast("cpu", dtype=low, policy=policy)


UNLISTED: dict[str, Call] = {
    **{name: lambda t, name=name: getattr(torch, name)(t(4, 4)) for name in (  # type: ignore[misc]
        "abs", "amax", "atan", "ceil", "cos", "erf", "log1p", "mean", "neg", "relu", "sigmoid", "sin", "sqrt", "tanh"
    )},
    "adaptive_avg_pool2d": lambda t: F.adaptive_avg_pool2d(t(1, 2, 4, 4), 2),
    "avg_pool2d": lambda t: F.avg_pool2d(t(1, 2, 4, 4), 2),
    "batch_norm": lambda t: F.batch_norm(t(4, 2), None, None, training=True),
    "celu": lambda t: F.celu(t(4, 4)),
    "clamp": lambda t: t(4, 4).clamp(0.3, 0.6),
    "dropout": lambda t: F.dropout(t(4, 4), 0.0),
    "embedding": lambda t: F.embedding(t.labels(3, of=4), t(4, 2)),
    "elu": lambda t: F.elu(t(4, 4)),
    "glu": lambda t: F.glu(t(4, 4)),
    "index_select": lambda t: t(4, 4).index_select(0, t.labels(2, of=4)),
    "instance_norm": lambda t: F.instance_norm(t(2, 2, 4)),
    "leaky_relu": lambda t: F.leaky_relu(t(4, 4)),
    "logsigmoid": lambda t: F.logsigmoid(t(4, 4)),
    "logsumexp": lambda t: torch.logsumexp(t(4, 4), 0),
    "max_pool2d": lambda t: F.max_pool2d(t(1, 2, 4, 4), 2),
    "silu": lambda t: F.silu(t(4, 4)),
    "rms_norm": lambda t: F.rms_norm(t(4, 4), (4,), t(4)),
    "sdpa": lambda t: F.scaled_dot_product_attention(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)),
    "special_exp2": lambda t: torch.special.exp2(t(4, 4)),
    "where": lambda t: torch.where(t(4, 4) > 0.5, t(4, 4), t(4, 4)),
}  # fmt: skip
"""Functions that call nothing listed. On the CPU all of them have kernels for the low dtypes."""

INSIDE: dict[str, Call] = {
    "_safe_softmax": lambda t: torch.ops.aten._safe_softmax(t(4, 4), -1),
    "_sparse_addmm": lambda t: torch.sparse.addmm(t(4, 4), t(4, 4).to_sparse(), t(4, 4)),
    "_sparse_mm": lambda t: torch.sparse.mm(t(4, 4).to_sparse(), t(4, 4)),
    "_weight_norm": lambda t: torch._weight_norm(t(2, 3, 4), t(1, 3, 1), 1),
    "affine_grid_generator": lambda t: F.affine_grid(t(1, 2, 3), [1, 1, 4, 4], align_corners=False),
    "arccos": lambda t: torch.arccos(t(4, 4)),
    "arcsin": lambda t: torch.arcsin(t(4, 4)),
    "cdist": lambda t: torch.cdist(t(40, 4), t(40, 4)),
    "chain_matmul": lambda t: torch._VF.chain_matmul([t(4, 4), t(4, 4), t(4, 4)]),  # type: ignore[attr-defined]
    "corrcoef": lambda t: torch.corrcoef(t(4, 4)),
    "cov": lambda t: torch.cov(t(4, 4)),
    "cumulative_trapezoid.dx": lambda t: torch.cumulative_trapezoid(t(4, 4)),
    "cumulative_trapezoid.x": lambda t: torch.cumulative_trapezoid(t(4, 4), t(4, 4)),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(4, 4), t(4, 4)),
    "embedding_renorm_": lambda t: F.embedding(t.labels(40, of=50), t(50, 5), max_norm=0.1),
    "huber_loss": lambda t: F.huber_loss(t(4, 4), t(4, 4), reduction="sum"),
    "inner": lambda t: torch.inner(t(4, 4), t(4, 4)),
    "ldexp.Tensor": lambda t: torch.ldexp(t(4, 4), t(4, 4)),
    "linalg_matmul": lambda t: torch.linalg.matmul(t(4, 4), t(4, 4)),
    "linalg_matrix_exp": lambda t: torch.linalg.matrix_exp(t(3, 1, 1)),
    "linalg_matrix_norm": lambda t: torch.linalg.matrix_norm(t(4, 4), 1),
    "linalg_matrix_power": lambda t: torch.linalg.matrix_power(t(4, 4), 3),
    "linalg_multi_dot": lambda t: torch.linalg.multi_dot([t(4, 4), t(4, 4), t(4, 4)]),
    "linalg_norm": lambda t: torch.linalg.norm(t(4, 4)),
    "linalg_norm.ord_str": lambda t: torch.linalg.norm(t(4, 4), "fro"),
    "linalg_pinv": lambda t: torch.linalg.pinv(t(4, 4), rcond=0.25),
    "linalg_pinv.atol_rtol_float": lambda t: torch.linalg.pinv(t(4, 4), rtol=0.25),
    "linalg_pinv.atol_rtol_tensor": lambda t: torch.linalg.pinv(t(4, 4), rtol=torch.tensor(0.25)),
    "linalg_pinv.rcond_tensor": lambda t: torch.linalg.pinv(t(4, 4), rcond=torch.tensor(0.25)),
    "linalg_vecdot": lambda t: torch.linalg.vecdot(t(4, 4), t(4, 4)),
    "matrix_exp": lambda t: torch.matrix_exp(t(3, 1, 1)),
    "matrix_power": lambda t: torch.matrix_power(t(4, 4), 3),
    "mvlgamma": lambda t: torch.mvlgamma(t(4, 4) + 1, 2),
    "norm_except_dim": lambda t: torch.norm_except_dim(t(4, 4), 2, 0),
    "pairwise_distance": lambda t: F.pairwise_distance(t(4, 4), t(4, 4)),
    "pinverse": lambda t: torch.pinverse(t(4, 4), 0.25),
    "scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(t(2, 4, 8), t(2, 4, 8), t(2, 4, 8)),
    "special_erfinv": lambda t: torch.special.erfinv(t(4, 4)),
    "special_expm1": lambda t: torch.special.expm1(t(4, 4)),
    "special_log_softmax": lambda t: torch.special.log_softmax(t(4, 4), -1),
    "special_multigammaln": lambda t: torch.special.multigammaln(t(4, 4) + 1, 2),
    "special_softmax": lambda t: torch.special.softmax(t(4, 4), -1),
    "square": lambda t: t(4, 4).square(),
    "sum_to_size": lambda t: t(4, 4).sum_to_size(1, 4),
    "tensordot": lambda t: torch.tensordot(t(4, 4), t(4, 4), 1),
    "trapezoid.dx": lambda t: torch.trapezoid(t(4, 4)),
    "trapezoid.x": lambda t: torch.trapezoid(t(4, 4), t(4, 4)),
    "trapz.dx": lambda t: torch.trapz(t(4, 4)),
    "trapz.x": lambda t: torch.trapz(t(4, 4), t(4, 4)),
}
"""A call of every op that is made of listed ones, by its row."""

NO_LOW_KERNEL = ("linalg_pinv", "pinverse")
"""By how they begin: ops that compute in float32 and float64 only, so that repairs take a low input to float32."""


def same(result: Tensor, expected: Tensor) -> bool:
    return result.dtype is expected.dtype and torch.equal(result, expected)


@low_dtypes
@pytest.mark.parametrize("name", [*UNLISTED, *INSIDE])
def test_what_is_not_listed_runs_in_the_dtype_that_comes_in_to_the_bit(name: str, low: torch.dtype) -> None:
    call = {**UNLISTED, **INSIDE}[name]
    for dtype in (F32, F64, low):
        with region(low):
            result = call(Make(dtype))
        if dtype is low and name.startswith(NO_LOW_KERNEL):
            with pytest.raises(RuntimeError, match="expected a tensor with 2 or more dimensions of float"):
                call(Make(low))
            assert result.dtype is F32
        else:
            assert same(result, call(Make(dtype)))


def test_every_row_of_an_unlisted_op_is_called_here() -> None:
    rows = {row["op"].removeprefix("aten::"): row for row in tables.read("torch", "apex-o1")}
    unlisted = {op: row for op, row in rows.items() if row["policy"] == "fallthrough"}
    assert set(unlisted) == set(INSIDE)
    bases = {op.split(".")[0] for op in rows}
    for row in unlisted.values():
        head, _, inside = row["apex"].removesuffix(" inside").partition(": ")
        assert head == "not listed"
        assert inside.split()
        assert set(inside.split()) <= bases


@pytest.mark.parametrize("name", INSIDE)
def test_without_its_row_an_op_would_follow_the_lists_inside(name: str) -> None:
    rules = {op if "." in op else f"{op}.default": rule for op, rule in builtin_policy("apex-o1").ops.items()}
    bare = Policy("bare", {op: rule for op, rule in rules.items() if rule is not CastPolicy.FALLTHROUGH})
    differs = []
    for dtype in (F32, BF16):
        with region(BF16, bare):
            result = INSIDE[name](Make(dtype))
        with region(BF16):
            differs.append(not same(result, INSIDE[name](Make(dtype))))
    assert any(differs)


@low_dtypes
def test_mixed_dtypes_of_an_unlisted_op_are_mended(low: torch.dtype) -> None:
    x, y = Make(low)(4, 4), Make(F32, seed=1)(4, 4)
    with region(low):
        product = torch.einsum("ij,jk->ik", x, y)
        inner = torch.inner(y, x)
        attention = F.scaled_dot_product_attention(x[None], y[None], x[None])
    # The same products in float32, added in another order.
    torch.testing.assert_close(product, x.float() @ y, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inner, y @ x.float().T, rtol=1e-6, atol=1e-6)
    assert attention.dtype is F32


@low_dtypes
def test_batch_norm_takes_low_data_with_float32_weights_and_statistics(low: torch.dtype) -> None:
    norm, x = nn.BatchNorm2d(2), Make(low)(4, 2, 3, 3)
    with region(low):
        result = norm(x)
    assert result.dtype is low
    assert norm.running_mean is not None
    assert norm.running_mean.dtype is F32
    # The mean of 36 values, added in another order.
    torch.testing.assert_close(norm.running_mean, x.float().mean((0, 2, 3)) * 0.1, rtol=1e-5, atol=0)


SHARED: dict[str, tuple[Call, str]] = {
    "torch.sub": (lambda t: torch.sub(t(4, 4), torch.tensor(0.3)), "Tensor.__sub__ is the same op, sub.Tensor"),
    "linalg.vector_norm": (lambda t: torch.linalg.vector_norm(t(4, 4)), "torch.norm is the same op"),
    "linalg.matrix_norm": (lambda t: torch.linalg.matrix_norm(t(4, 4), "fro"), "torch.norm(x, 'nuc') is the same op"),
}
"""Names on no list that are in float32 since a listed name is the same op, and the name."""


@low_dtypes
@pytest.mark.parametrize("name", SHARED)
def test_a_name_that_is_the_same_op_as_a_listed_one_follows_it(name: str, low: torch.dtype) -> None:
    call, _ = SHARED[name]
    with region(low):
        assert call(Make(low)).dtype is F32
    assert call(Make(low)).dtype is low


@low_dtypes
def test_modules_that_apex_did_not_reach_follow_the_list_of_their_function(low: torch.dtype) -> None:
    """Apex replaced names in namespaces; nn.PReLU and nn.Bilinear hold the functions themselves."""
    x, y = Make(F32)(4, 4), Make(low)(4, 4)
    with region(low):
        assert nn.PReLU()(x).dtype is low
        assert nn.Bilinear(4, 4, 2)(y, y).dtype is F32
