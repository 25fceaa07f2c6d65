"""What `lint` finds in models and optimizers without running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo.torch
from mezzo.errors import DtypeError
from mezzo.report import Finding
from mezzo.torch import set_default_policy
from mezzo.torch.linting.hardware import slow_reason
from mezzo.torch.linting.lint import lint

HALF, LOW = torch.float16, torch.bfloat16


def found(*args: Any, **options: Any) -> list[Finding]:
    """Give what lint finds on the CPU; whether this machine is fast in the dtype is not the subject here."""
    return [finding for finding in lint(*args, device="cpu", **options) if finding.kind != "slow dtype"]


def kinds(*args: Any, **options: Any) -> list[str]:
    return [finding.kind for finding in found(*args, **options)]


class Scaled(nn.Module):
    """Divides by a norm, as many self-written layers do."""

    def __init__(self, eps: float = 1e-8, mask_value: float = -1e4) -> None:
        super().__init__()
        self.eps = eps
        self.mask_value = mask_value

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.norm() + self.eps)


class Upcasting(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (wide.norm() + self.eps)).to(x.dtype)


class Masked(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([[0.0, value], [0.0, 0.0]]))


def test_an_eps_that_is_0_in_float16_is_found_with_the_modules_that_have_it() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), Scaled()) for _ in range(3)))
    [finding] = found(net)
    assert finding.kind == "eps lost"
    assert finding.message == "eps=1e-08 of Scaled '*.1' is 0 in float16, whose smallest number is 6e-08"
    assert (finding.path, finding.count) == (("*.1",), 3)
    assert finding.advice.startswith("mezzo.torch.set_precision(model, {'*.1': 'fp32'})")


def test_the_line_of_the_advice_can_be_pasted() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), Scaled()))
    [finding] = found(model)
    placed = eval(finding.advice.split(";")[0], {"mezzo": mezzo, "model": model})
    assert placed.matched == {"0.1": ("0.1",)}


@pytest.mark.parametrize(
    "module",
    [Scaled(eps=1e-6), Upcasting(), nn.LayerNorm(2, eps=1e-12), nn.BatchNorm1d(2, eps=1e-12), nn.RMSNorm(2, eps=1e-12)],
    ids=["larger", "casts up", "LayerNorm", "BatchNorm", "RMSNorm"],
)
def test_an_eps_that_is_kept_or_added_in_float32_is_not_found(module: nn.Module) -> None:
    assert found(nn.Sequential(module)) == []


def test_no_eps_is_lost_in_bfloat16() -> None:
    assert found(nn.Sequential(Scaled()), dtype=LOW) == []


def test_pytorchs_norms_do_keep_a_tiny_eps_in_float16() -> None:
    x = torch.zeros(2, 4, dtype=HALF)
    for module in (nn.LayerNorm(4, eps=1e-12), nn.RMSNorm(4, eps=1e-12), nn.GroupNorm(1, 4, eps=1e-12)):
        assert torch.isfinite(module.half()(x)).all()


def test_an_eps_is_safe_where_a_rule_has_the_op_in_float32() -> None:
    net = nn.Sequential(nn.CosineSimilarity())
    assert kinds(net) == ["eps lost"]
    set_default_policy("unified")
    try:
        assert kinds(net) == []
    finally:
        set_default_policy(None)


@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float32).min])
def test_a_mask_value_that_float16_does_not_hold_is_found(value: float) -> None:
    [finding] = found(nn.Sequential(Scaled(eps=1e-3, mask_value=value)))
    assert finding.kind == "mask overflow"
    assert "-inf in float16" in finding.message


def test_a_mask_value_that_the_dtype_holds_is_not_found() -> None:
    assert found(nn.Sequential(Scaled(eps=1e-3, mask_value=-6e4))) == []
    assert found(nn.Sequential(Scaled(eps=1e-3, mask_value=float("-inf")))) == []
    assert found(nn.Sequential(Scaled(eps=1e-3, mask_value=-1e9)), dtype=LOW) == []
    assert kinds(nn.Sequential(Scaled(mask_value=torch.finfo(torch.float32).min)), dtype=LOW) == ["mask overflow"]


def test_a_large_number_that_is_no_mask_is_not_found() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].rope_theta = 1e6
    assert found(net) == []
    net[0].fill_value = 1e6
    assert kinds(net) == ["mask overflow"]


def test_a_bound_that_cuts_nothing_off_is_no_mask() -> None:
    # An infinite bound does what -1e9 does in float16; a threshold's value is written, and is -inf then.
    assert kinds(nn.Hardtanh(-1e9, 1e9)) == []
    assert kinds(nn.Threshold(0.1, -1e9)) == ["mask overflow"]


def test_a_buffer_of_a_mask_is_looked_into() -> None:
    [finding] = found(nn.Sequential(Masked(-1e9)))
    assert finding.kind == "mask overflow"
    assert finding.message == "the buffer 0.mask has -1e+09, which is -inf in float16"
    assert found(nn.Sequential(Masked(float("-inf")))) == []
    assert found(nn.Sequential(Masked(-1e9)).to("meta")) == []


@pytest.mark.parametrize("dtype", [HALF, LOW], ids=str)
def test_a_model_that_is_stored_low_is_found(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)
    [finding] = found(net)
    assert finding.kind == "half weights"  # whether there is an autocast region nobody knows here
    assert finding.message.startswith(
        f"4 parameters are stored in {str(dtype).removeprefix('torch.')} (0.weight, 0.bias"
    )
    assert "mezzo.torch.prepare(model, optimizer)" in finding.advice


@pytest.mark.parametrize("options", [{}, {"masters": "kahan"}, {"masters": False, "rounding": "stochastic"}], ids=str)
def test_a_prepared_model_is_not_found_whatever_keeps_its_updates(options: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    model, optimizer = mezzo.torch.prepare(net, torch.optim.Adam(net.parameters()), dtype=LOW, **options)
    assert model[0].weight.dtype is LOW
    assert found(model, optimizer) == []


def test_a_prepared_float16_model_keeps_the_eps_of_its_optimizer() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    model, optimizer = mezzo.torch.prepare(net, torch.optim.Adam(net.parameters()), dtype=HALF)
    assert model[0].weight.dtype is HALF
    assert found(model, optimizer) == []


def test_frozen_low_weights_are_not_found() -> None:
    assert found(nn.Sequential(nn.Linear(2, 2)).to(LOW).requires_grad_(False)) == []


def test_a_loss_of_probabilities_in_a_model_is_found() -> None:
    net = nn.ModuleDict({"head": nn.Sigmoid(), "loss": nn.BCELoss()})
    [finding] = found(net)
    assert (finding.kind, finding.path) == ("bce after sigmoid", ("loss",))
    assert finding.advice.startswith("nn.BCEWithLogitsLoss()")
    assert found(nn.ModuleDict({"loss": nn.BCEWithLogitsLoss()})) == []


OPTIMIZERS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_the_eps_of_an_optimizer_of_float16_weights_is_found(optimizer: Any) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=HALF))
    made = optimizer([weight])
    [finding] = found(optimizer=made)
    assert finding.kind == "eps lost"
    weight.grad = torch.zeros_like(weight)
    made.step()
    assert torch.isnan(weight).any(), "the finding is true: a gradient of 0 makes the weight NaN"


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(HALF, {"eps": 1e-4}), (HALF, {"fused": True}), (torch.float32, {}), (LOW, {})],
    ids=["larger", "fused", "float32", "bfloat16"],
)
def test_an_eps_that_the_steps_keep_is_not_found(dtype: torch.dtype, options: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = torch.optim.Adam([weight], **options)
    assert found(optimizer=optimizer) == []
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.isfinite(weight).all()


def test_several_optimizers_and_their_groups_are_looked_at() -> None:
    low, wide = nn.Parameter(torch.ones(2, dtype=HALF)), nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([{"params": [low], "eps": 1e-9}, {"params": [wide]}])
    assert [finding.message.split()[0] for finding in found(optimizer=[adam, torch.optim.Adam([low])])] == [
        "eps=1e-09",
        "eps=1e-08",
    ]


def test_a_slow_dtype_is_found_where_the_machine_has_no_kernels_for_it() -> None:
    for dtype in (HALF, LOW):
        reason = slow_reason(str(dtype).removeprefix("torch."), "cpu")
        slow = [finding for finding in lint(dtype=dtype, device="cpu") if finding.kind == "slow dtype"]
        assert [finding.message.endswith(reason) for finding in slow] == [True] * bool(reason)


def test_linting_changes_nothing_and_runs_nothing() -> None:
    class Raises(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError

    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Raises(), Masked(-1e9))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    lint(net, torch.optim.Adam(net.parameters()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_wrappers_are_looked_through_for_names() -> None:
    net = nn.DataParallel(nn.Sequential(Scaled()))
    assert [finding.path for finding in found(net)] == [("0",)]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dtype": torch.float32}, DtypeError, "got dtype=torch.float32; pass the dtype of your region"),
        ({"model": F.relu}, TypeError, "torch.nn.Module as model, got .*; pass code and functions as source="),
        ({"optimizer": 3}, TypeError, "torch.optim.Optimizer, or several, as optimizer, got int"),
        ({"optimizer": ["adam"]}, TypeError, "as optimizer, got str"),
        ({"source": 3}, TypeError, "files, modules, classes and functions as source, got int"),
        ({"source": "nowhere.py"}, OSError, "nowhere.py"),
        ({"device": "nowhere"}, RuntimeError, "nowhere"),
    ],
)
def test_what_is_not_allowed_is_told(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        lint(**arguments)
