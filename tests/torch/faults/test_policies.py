"""Section H: policies that cannot be read, changed, or given to a part of a model (top 15 no. 5).

PyTorch has no API for any of it, so under ``--amp torch`` most of these fail for want of the function.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from .amps import Amp, assert_near, low_dtypes


class Attention(nn.Module):
    """Stands for somebody else's attention, whose source one cannot change."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.scores: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        weights = (query @ key.mT).softmax(-1)
        self.scores.append(weights.detach())
        return weights @ value


def exact(attention: Attention, x: Tensor) -> Tensor:
    return copy.deepcopy(attention).double()(x.double())


@low_dtypes
def test_h1_softmax_in_float32_inside_somebody_elses_attention(amp: Amp, low: torch.dtype) -> None:
    """H1: one op's rule, in one module: `set_precision`."""
    net, x = nn.ModuleDict({"first": Attention(), "second": Attention()}), torch.randn(5, 8)
    with amp.set_precision(net, {"second": {"softmax": "fp32"}}), amp.region(low):
        results = [attention(x) for attention in net.values()]
    assert net["first"].scores[0].dtype is low
    assert net["second"].scores[0].dtype is torch.float32
    # Rows that sum to one to float32's precision; in bfloat16 they do so to three digits.
    assert_near(net["second"].scores[0].sum(-1), torch.ones(5), torch.float32)
    for attention, result in zip(net.values(), results, strict=True):
        assert_near(result, exact(attention, x), low)


@low_dtypes
def test_h1_two_instances_of_one_class_have_each_its_own_precision(amp: Amp, low: torch.dtype) -> None:
    """H1: precision per instance and not per class: `set_precision` by name."""
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    with amp.set_precision(net, {"1": "fp32"}), amp.region(low):
        hidden = net[0](x)
        result = net(x)
    assert_near(hidden, net[0](x), low)
    reference = nn.functional.linear(hidden.double(), net[1].weight.double(), net[1].bias.double())
    assert_near(result, reference, torch.float32)


@low_dtypes
def test_h1_one_ops_rule_is_changed(amp: Amp, low: torch.dtype) -> None:
    """H1, top 15 no. 5: the list of a region is edited: ``policy=`` with `Policy.override`."""
    from mezzo import builtin_policy

    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with amp.region(low, policy=builtin_policy("default").override({"mm": "fp32"})):
        exact_product, other = torch.mm(a, b), torch.bmm(a[None], b[None])[0]
    assert_near(exact_product, a.double() @ b.double(), torch.float32)
    assert_near(other, a.double() @ b.double(), low)


def test_h3_the_lists_can_be_read(amp: Amp) -> None:
    """H3, top 15 no. 5: what happens to an op can be asked: `active_policy`, `Policy.rule` and `Policy.explain`."""
    with amp.region():
        policy = amp.active_policy("cpu").on("cpu")
    assert {op for op in ("linear", "softmax", "mse_loss") if policy.rule(op) != "fallthrough"} == {
        "linear",
        "mse_loss",
    }
    assert policy.rule("linear") == "lower_precision_fp"
    assert policy.explain("mse_loss").ops[0].inputs["bfloat16"]["bfloat16"] == "float32"


@low_dtypes
def test_h5_batch_norm_keeps_float32_statistics(amp: Amp, low: torch.dtype) -> None:
    """H5: normalization layers are put in float32 by name; activations are cast for them, their buffers stay float32."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(16, 4) + 3
    reference = copy.deepcopy(net[1]).double()
    with amp.set_precision(net, {"1": "fp32"}), amp.region(low):
        hidden = net[0](x)
        result = net(x)
    assert hidden.dtype is low
    assert_near(result, reference(hidden.double()), torch.float32)
    for got, wanted in ((net[1].running_mean, reference.running_mean), (net[1].running_var, reference.running_var)):
        assert_near(got, wanted, torch.float32)


@low_dtypes
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_h8_a_model_has_its_policy_wherever_it_is_called(amp: Amp, low: torch.dtype, training: bool) -> None:
    """H8: a policy on the model, by `set_precision`, rules in a trainer's plain `torch.autocast` and in mezzo's regions."""
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).train(training), torch.randn(4, 8)
    with amp.set_precision(net, {"": "unified"}):
        with torch.autocast("cpu", dtype=low):
            trainers = net(x)
        with amp.region(low):
            own = net(x)
    assert torch.equal(trainers, own)
    assert_near(own, net(x), torch.float32, computed=low)
