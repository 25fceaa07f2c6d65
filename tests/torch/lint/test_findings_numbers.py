"""Findings of numbers that do not survive: recorded programs, and near misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.report import Finding
from mezzo.torch import autocast, explain

from .made import kinds, only, op

HALF = torch.float16


class Net(nn.Module):
    """A linear layer, and a function of what it gives."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = Call(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Call(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def findings(function: Callable[[Tensor], Tensor], dtype: torch.dtype = HALF) -> list[Finding]:
    """Run a function of a layer's output in a region, and give what is found in it."""
    torch.manual_seed(0)
    net = Net(function)
    with explain(model=net) as explained, autocast("cpu", dtype=dtype):
        net(torch.rand(2, 4))
    # Whether the machine is fast in the dtype is not the subject here.
    return [one for one in explained.report.warnings if one.kind != "slow dtype"]


def kinds_in(function: Callable[[Tensor], Tensor], dtype: torch.dtype = HALF) -> set[str]:
    return {finding.kind for finding in findings(function, dtype)}


MASK = torch.tensor([True, False, True, False])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.log(x + 1e-8),
        lambda x: x / x.norm().clamp(min=1e-12),
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.cosine_similarity(x, x),
        lambda x: torch.log(1 - x.sigmoid().clamp(1e-4, 1 - 1e-7)),
    ],
    ids=["add", "clamp", "normalize", "cosine_similarity", "clamp to 1"],
)
def test_a_constant_that_float16_does_not_hold_is_found(function: Callable[[Tensor], Tensor]) -> None:
    [found] = [one for one in findings(function) if one.kind == "eps lost"]
    assert found.path == ("head",)
    assert found.source is not None
    assert found.source.file == __file__
    assert "float16" in found.message
    assert "mezzo.torch.set_precision(model, {'head': 'fp32'})" in found.advice


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.log(x + 1e-4),
        lambda x: torch.log(x.float() + 1e-8),
        lambda x: F.normalize(x.float(), dim=-1),
        lambda x: F.layer_norm(x, (4,), eps=1e-12),
        lambda x: x.clamp(1e-4, 1 - 1e-3),
        lambda x: torch.add(x, x, alpha=1e-9),
        lambda x: x * 1e-9,
    ],
    ids=["larger", "float32", "normalize in float32", "layer_norm", "clamp", "alpha", "factor"],
)
def test_a_constant_that_is_kept_or_that_is_no_eps_is_not_found(function: Callable[[Tensor], Tensor]) -> None:
    assert "eps lost" not in kinds_in(function)


def test_bfloat16_holds_a_small_eps_and_no_number_close_to_one() -> None:
    assert kinds_in(lambda x: torch.log(x.abs() + 1e-8), torch.bfloat16) == set()
    [found] = findings(lambda x: x.sigmoid().clamp(0.0, 0.999), torch.bfloat16)
    assert found.kind == "eps lost"
    assert "0.999 is 1 in bfloat16, so that 1 minus it is 0" in found.message


def test_the_cure_of_a_lost_eps_cures_it() -> None:
    from mezzo.torch import set_precision

    net = Net(lambda x: torch.log(x * 0 + 1e-8))
    with autocast("cpu", dtype=HALF):
        assert torch.isinf(net(torch.rand(2, 4))).all()
    with set_precision(net, {"head": "fp32"}), explain(model=net) as explained, autocast("cpu", dtype=HALF):
        out = net(torch.rand(2, 4))
    assert torch.isfinite(out).all()
    assert "eps lost" not in {finding.kind for finding in explained.report.warnings}


@pytest.mark.parametrize(
    ("options", "lost"),
    [({"foreach": False}, True), ({"foreach": True}, True), ({"fused": True}, False)],
    ids=["for loop", "foreach", "fused"],
)
def test_the_eps_of_an_optimizer_of_float16_weights_is_found_unless_it_is_fused(
    options: dict[str, bool], lost: bool
) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=HALF))
    weight.grad = torch.zeros(4, dtype=HALF)
    with explain() as explained:
        torch.optim.Adam([weight], **options).step()
    assert bool(torch.isnan(weight).any()) is lost
    found = [one for one in explained.report.warnings if one.kind == "eps lost"]
    assert len(found) == lost
    assert all("mezzo.torch.prepare(model, optimizer)" in one.advice for one in found)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + MASK * x.new_ones(()) * -1e9,
        lambda x: torch.where(MASK, x, -1e9),
        lambda x: F.linear(torch.zeros(2, 4).masked_fill(MASK, -1e9), torch.ones(4, 4)) + x,
    ],
    ids=["product", "where", "cast later"],
)
def test_a_mask_of_minus_1e9_is_found_in_float16_and_not_in_bfloat16(function: Callable[[Tensor], Tensor]) -> None:
    [found] = [one for one in findings(function) if one.kind == "mask overflow"]
    assert found.path == ("head",)
    assert "-1e+09, which is -inf in float16" in found.message
    assert found.advice == "fill with torch.finfo(x.dtype).min, x being what is masked"
    assert "mask overflow" not in kinds_in(function, torch.bfloat16)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.masked_fill(MASK, torch.finfo(x.dtype).min),
        lambda x: x.masked_fill(MASK, float("-inf")),
        lambda x: x.float().masked_fill(MASK, -1e9).softmax(-1),
        lambda x: x / 1e9,
    ],
    ids=["smallest", "inf", "float32", "divisor"],
)
def test_a_mask_that_float16_holds_is_not_found(function: Callable[[Tensor], Tensor]) -> None:
    assert "mask overflow" not in kinds_in(function)


def test_only_a_mask_that_goes_to_a_softmax_is_told_of_its_nan() -> None:
    def softmax_told(function: Callable[[Tensor], Tensor]) -> bool:
        [found] = [one for one in findings(function) if one.kind == "mask overflow"]
        return "becomes NaN in softmax" in found.message

    assert softmax_told(lambda x: (torch.where(MASK, x, -1e9) * 2).softmax(-1))
    assert not softmax_told(lambda x: torch.where(MASK, x, -1e9).relu())


def test_a_large_factor_is_no_mask_unless_a_softmax_follows() -> None:
    [found] = [one for one in findings(lambda x: (x * 1e5).relu()) if "overflow" in one.kind]
    assert found.kind == "constant overflow"
    assert found.message.endswith(
        "has the constant 100000 and gives float16, whose largest number is 65504: what is larger than 0.66 becomes inf"
    )
    assert "softmax" not in found.message
    assert "mask" not in found.advice
    assert "constant overflow" not in kinds_in(lambda x: (x * 1e5).relu(), torch.bfloat16)
    assert "constant overflow" not in kinds_in(lambda x: x * 6e4)
    assert "mask overflow" in kinds_in(lambda x: (x - MASK * x.new_ones(()) * 1e9).softmax(-1))


def _loss(x: Tensor) -> Tensor:
    with autocast("cpu", enabled=False):
        return F.mse_loss(x, torch.zeros_like(x))


def test_a_loss_in_float16_is_found() -> None:
    [found] = [one for one in findings(_loss) if one.kind == "float16 loss"]
    assert "mse_loss in 'head' computes the loss in float16" in found.message
    assert "output.float()" in found.advice


def test_a_loss_that_the_region_has_in_float32_is_not_found() -> None:
    assert "float16 loss" not in kinds_in(lambda x: F.mse_loss(x, torch.zeros_like(x)))
    assert "float16 loss" not in kinds_in(_loss, torch.bfloat16)


@pytest.mark.parametrize("amp", ["mezzo", "torch"])
def test_a_float16_loss_that_a_scaler_is_given_is_found(amp: str) -> None:
    import mezzo.torch

    scaler = mezzo.torch.GradScaler("cpu") if amp == "mezzo" else torch.amp.GradScaler("cpu")
    x = torch.ones(4, requires_grad=True)
    with explain() as low:
        scaler.scale(x.half().mean())
    with explain() as wide:
        scaler.scale(x.half().float().mean())
    assert [one.kind for one in low.report.warnings] == ["float16 loss"]
    assert low.report.warnings[0].advice.startswith("scaler.scale(loss.float())")
    assert wide.report.warnings == ()


def test_a_float16_loss_that_is_scaled_too_is_one_finding() -> None:
    import mezzo.torch

    x = torch.ones(4, dtype=HALF, requires_grad=True)
    with explain() as explained:
        mezzo.torch.GradScaler("cpu").scale(F.mse_loss(x, torch.zeros_like(x)))
    assert [one.kind for one in explained.report.warnings] == ["float16 loss"]
    assert "mse_loss computes the loss in float16" in explained.report.warnings[0].message


def test_a_binary_cross_entropy_of_a_sigmoid_is_found_under_autocast_only() -> None:
    def loss(x: Tensor) -> Tensor:
        return F.binary_cross_entropy(x.sigmoid().float(), torch.ones(2, 4))

    [found] = [one for one in findings(loss) if one.kind == "bce after sigmoid"]
    assert "1 in float16 from 8.4 on" in found.message
    assert "binary_cross_entropy_with_logits" in found.advice
    with explain() as explained:
        loss(torch.rand(2, 4))
    assert explained.report.warnings == ()


def test_a_sigmoid_is_seen_through_copies_and_casts() -> None:
    target = torch.ones(2, 4)
    assert "bce after sigmoid" in kinds_in(lambda x: F.binary_cross_entropy(x.sigmoid().clone().float(), target))


def test_a_binary_cross_entropy_of_logits_or_of_given_probabilities_is_not_found() -> None:
    target = torch.ones(2, 4)
    assert "bce after sigmoid" not in kinds_in(lambda x: F.binary_cross_entropy_with_logits(x, target))
    assert "bce after sigmoid" not in kinds_in(lambda x: F.binary_cross_entropy(torch.rand(2, 4), target))


def test_like_modules_are_one_finding_and_others_are_not() -> None:
    layers = [op("mul", i, came="float16", gave="float16", scalars=(-1e9,), path=f"layers.{i}.attn") for i in range(3)]
    other = op("mul", 3, came="float16", gave="float16", scalars=(-1e9,), path="head", line=9)
    first, second = (one for one in _found("mask overflow", *layers, other))
    assert (first.path, first.count) == (("layers.*.attn",), 3)
    assert (second.path, second.count) == (("head",), 1)


def _found(kind: str, *ops: object) -> list[Finding]:
    from mezzo.torch.linting.findings import findings_of

    return [one for one in findings_of(ops) if one.kind == kind]  # type: ignore[arg-type]


def test_a_flag_is_no_number() -> None:
    assert kinds(op("clamp", came="float16", gave="float16", scalars=(True, 1))) == []


def test_a_mask_beside_which_something_else_is_cast_is_not_found() -> None:
    mask = op("masked_fill", 0, came="float32", gave="float32", scalars=(-1e9,))
    mixed = {"came": "float32 float32", "gave": "float32", "rule": "promote", "producers": (0, -1)}
    assert kinds(mask, op("add", 1, used="float32 float16", **mixed)) == []
    assert kinds(mask, op("add", 1, used="float16 float16", **mixed)) == ["mask overflow"]


def test_the_same_line_with_two_constants_gives_two_findings() -> None:
    ops = [op("add", i, came="float16", gave="float16", scalars=(eps,)) for i, eps in enumerate((1e-8, 1e-9, 1e-8))]
    assert sorted((one.message.split()[6], one.count) for one in _found("eps lost", *ops)) == [
        ("1e-08", 2),
        ("1e-09", 1),
    ]
    assert only("eps lost", ops[0]).count == 1
