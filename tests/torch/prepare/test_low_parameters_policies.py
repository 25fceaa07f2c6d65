"""Which policy decides whether a parameter is stored low: the argument, the region's, a module's, on which device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo import Policy, builtin_policy
from mezzo.errors import UnknownPolicyError
from mezzo.torch import autocast, set_default_policy, set_precision
from tests.torch.named_model import Model
from tests.torch.prepare.choosing import CELL, LAYER, WEIGHT, chosen, of, reasons


def test_the_rules_of_the_policy_count() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.LayerNorm(2))
    mine = builtin_policy("default").override({"linear": "fp32"})
    assert chosen(net, policy=mine) == ["1.weight", "1.bias"]
    assert chosen(net, policy="fp32") == []
    norms = builtin_policy("unified").override({"layer_norm": "lower_precision_fp"})
    assert chosen(net, policy=norms) == [name for name, _ in net.named_parameters()]
    assert chosen(net, policy=Policy("none")) == []
    with pytest.raises(UnknownPolicyError, match="'bfloat16' is no built-in policy"):
        chosen(net, policy="bfloat16")


def test_an_op_without_a_rule_leaves_it_to_the_one_inside() -> None:
    conv, cell = nn.Conv2d(2, 2, 1), nn.GRUCell(2, 2)
    inner = Policy("inner", {"convolution": "lower_precision_fp", "linear": "lower_precision_fp"})
    assert reasons(conv, policy=inner) == of("convolution runs in lower precision", *WEIGHT)
    assert reasons(cell, policy=inner) == of("linear runs in lower precision", *CELL)
    wide = Policy("wide", {"convolution": "fp32"})
    assert reasons(conv, policy=wide) == of("convolution does not run in lower precision", *WEIGHT)
    outer = inner.override({"conv2d": "fp32", "gru_cell": "fp32"})
    assert reasons(conv, policy=outer) == of("conv2d does not run in lower precision", *WEIGHT)
    assert reasons(cell, policy=outer) == of("gru_cell does not run in lower precision", *CELL)


def test_a_rule_may_differ_by_dtype() -> None:
    policy = Policy("mine", {"linear": {"bfloat16": "lower_precision_fp", "float16": "fp32"}})
    assert chosen(nn.Linear(2, 2), torch.bfloat16, policy) == ["weight", "bias"]
    assert chosen(nn.Linear(2, 2), torch.float16, policy) == []


def test_without_a_policy_that_of_the_region_around_counts_and_else_the_default() -> None:
    linear = nn.Linear(2, 2)
    set_default_policy("fp32")
    assert chosen(linear) == []
    with autocast("cpu", policy="torch"):
        assert chosen(linear) == ["weight", "bias"]
    set_default_policy(None)
    with autocast("cpu", policy="fp32"):
        assert chosen(linear) == []
    assert chosen(linear) == ["weight", "bias"]


def test_set_precision_keeps_what_a_module_reads_in_float32() -> None:
    net = Model()
    with set_precision(net, {"blocks.0.mlp.0": "fp32", "blocks.1": "fp32", "blocks.1.attn": "default"}):
        low = chosen(net)
    kept = [name for name, _ in net.named_parameters() if name not in low]
    assert kept == [
        "embed.weight",
        *("blocks.0.mlp.0.weight", "blocks.0.mlp.0.bias"),
        *("blocks.1.mlp.0.weight", "blocks.1.mlp.0.bias", "blocks.1.mlp.2.weight", "blocks.1.mlp.2.bias"),
    ]
    assert "blocks.0.mlp.0.weight" in chosen(net)


def test_rules_of_set_precision_are_laid_over_the_policy_around_the_module() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), nn.Linear(2, 2))
    set_precision(net, {"0": {"layer_norm": "lower_precision_fp"}, "": {"linear": "fp32"}})
    assert chosen(net) == ["0.1.weight", "0.1.bias"]
    set_precision(net, {"0": {"linear": "lower_precision_fp"}})
    assert chosen(net) == ["0.0.weight", "0.0.bias"]
    assert chosen(net, policy="fp32") == ["0.0.weight", "0.0.bias"]


def test_a_shared_module_goes_low_only_if_it_does_wherever_it_is() -> None:
    shared = nn.Linear(2, 2, bias=False)
    net = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    assert chosen(net) == ["0.0.weight"]
    set_precision(net, {"1": "fp32"})
    assert reasons(net) == {"0.0.weight": "linear does not run in lower precision, as '1.0.weight'"}


def on_cuda(module_class: type[nn.Module], *args: Any, **options: Any) -> nn.Module:
    """Make a module whose parameters PyTorch takes for CUDA's, on any machine."""
    module = module_class(*args, **options)
    with FakeTensorMode():
        for name, parameter in module._parameters.items():
            module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, device="cuda"), requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("module_class", "args", "expected"),
    [
        (nn.LSTMCell, (2, 2), of("lstm_cell runs in lower precision", *CELL)),
        (nn.Conv2d, (2, 2, 3), of("conv2d runs in lower precision", *WEIGHT)),
        (nn.LayerNorm, (2,), of("layer_norm does not run in lower precision", *WEIGHT)),
        (nn.Bilinear, (2, 2, 2), of("bilinear does not run in lower precision", *WEIGHT)),
        (nn.LSTM, (2, 2), of("lstm leaves its weights to kernels that differ by device", *LAYER)),
    ],
    ids=["LSTMCell", "Conv2d", "LayerNorm", "Bilinear", "LSTM"],
)
def test_on_cuda_its_own_table_counts(
    module_class: type[nn.Module], args: tuple[int, ...], expected: dict[str, str]
) -> None:
    assert reasons(on_cuda(module_class, *args)) == expected


def test_cuda_lists_no_convolution_with_named_padding_but_the_one_inside() -> None:
    assert reasons(on_cuda(nn.Conv2d, 2, 2, 3, padding="same")) == of("convolution runs in lower precision", *WEIGHT)


def test_a_cell_without_a_rule_is_kept_where_its_biases_are_read_by_a_fused_op() -> None:
    policy = Policy("mine", {"linear": "lower_precision_fp"})
    kept = of("gru_cell does not run in lower precision", *CELL)
    assert reasons(on_cuda(nn.GRUCell, 2, 2), policy=policy) == kept
    assert chosen(nn.GRUCell(2, 2), policy=policy) == list(CELL)


def test_parameters_without_memory_are_decided_about() -> None:
    assert chosen(nn.Linear(2, 2, device="meta")) == ["weight", "bias"]
