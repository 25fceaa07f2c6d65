"""Findings of dtypes that cost something or that autocast was not made for: recorded programs, and near misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.report import Finding
from mezzo.torch import autocast, explain, prepare, set_precision
from mezzo.torch.linting.dtypes import slow_dtypes
from mezzo.torch.linting.hardware import slow_on_cpu
from mezzo.torch.linting.prepared import prepared_names
from mezzo.torch.linting.recording import Recording

from .made import kinds, only, op

LOW = torch.bfloat16


class Net(nn.Module):
    """A linear layer, and a function of what it gives and of the input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.body(x), x)


def found(kind: str, net: nn.Module, x: Tensor | None = None, **options: object) -> list[Finding]:
    """Watch one call in a region, and give the findings of a kind."""
    x = torch.ones(4, 8) if x is None else x
    with explain(model=net) as explained, autocast("cpu", dtype=LOW, **options):  # type: ignore[arg-type]
        net(x)
    return [one for one in explained.report.warnings if one.kind == kind]


def test_an_op_that_a_rule_brings_to_float32_is_found_with_its_bytes() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    [finding] = found("float32 memory", net, policy="unified")
    assert finding.path == ("1",)
    # 4 x 8 elements: 2 bytes each out of the layer, 4 out of the softmax.
    assert finding.message == (
        "softmax in '1' takes bfloat16 and gives float32 by the policy's rule fp32_set_opt_dtype: 128 B of the "
        "192 B that the forward pass writes, half of it in bfloat16"
    )
    assert finding.advice.endswith("mezzo.torch.set_precision(model, {'1': {'softmax': 'lower_precision_fp'}})")


def test_the_cure_of_float32_memory_cures_it() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    set_precision(net, {"1": {"softmax": "lower_precision_fp"}})
    assert found("float32 memory", net, policy="unified") == []


def test_a_loss_and_what_is_small_are_no_float32_memory() -> None:
    assert found("float32 memory", Net(lambda y, x: nn.functional.mse_loss(y, torch.zeros_like(y)))) == []
    big = op("linear", 0, rule="lower_precision_fp", came="bfloat16", gave="bfloat16", shape_out=(1000, 100))
    small = op("softmax", 1, rule="fp32", came="bfloat16", used="float32", gave="float32", shape_out=(4, 4))
    assert kinds(big, small) == []
    assert kinds(small) == ["float32 memory"]


def test_an_op_that_float32_comes_to_is_no_float32_memory() -> None:
    assert kinds(op("softmax", rule="fp32", came="float32", gave="float32")) == []


@pytest.mark.parametrize("dtype", [torch.float16, LOW], ids=str)
def test_a_model_that_is_stored_low_is_found_under_autocast(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    [finding] = found("half model under autocast", net)
    word = str(dtype).removeprefix("torch.")
    assert finding.message.startswith(
        f"0.weight, 0.bias, 1.weight and 1 more: stored in {word} and used under autocast"
    )
    assert "mezzo.torch.prepare(model, optimizer)" in finding.advice
    assert finding.count == 4


def test_a_low_model_outside_of_regions_or_with_masters_is_not_found() -> None:
    net = nn.Sequential(nn.Linear(8, 8)).to(LOW)
    assert found("half model under autocast", net, torch.ones(4, 8, dtype=LOW), enabled=False) == []
    ops = [op("linear", came="bfloat16", gave="bfloat16", parameters=("0.weight",))]
    assert kinds(*ops) == ["half model under autocast"]
    from mezzo.torch.linting.findings import findings_of

    assert [*findings_of(ops, mastered=frozenset({"0.weight"}))] == []


@pytest.mark.parametrize("part", [False, True], ids=["model", "part"])
def test_a_prepared_model_or_part_is_not_found(part: bool) -> None:
    net = prepare(nn.Sequential(nn.Linear(8, 8)))
    model = nn.Sequential(nn.Linear(8, 8), net) if part else net
    assert prepared_names([model]) == {f"{'1.' * part}0.weight", f"{'1.' * part}0.bias"}
    assert found("half model under autocast", model) == []


@pytest.mark.parametrize("where", ["before", "inside"])
def test_an_input_that_is_cast_low_is_found(where: str) -> None:
    net = Net(lambda y, x: y)
    x = torch.ones(4, 8)
    if where == "before":
        [finding] = found("half input", net, x.to(LOW))
    else:
        with explain(model=net) as explained, autocast("cpu", dtype=LOW):
            net(x.to(LOW))
        [finding] = (one for one in explained.report.warnings if one.kind == "half input")
    assert finding.path == ("body",)
    assert "reads an input that comes in bfloat16 into a region of bfloat16" in finding.message


def test_a_float32_input_and_casts_inside_of_a_model_are_not_found() -> None:
    assert found("half input", Net(lambda y, x: y)) == []
    assert found("half input", Net(lambda y, x: x.to(LOW) + y)) == []
    outside = Net(lambda y, x: y).to(LOW)
    assert found("half input", outside, torch.ones(4, 8, dtype=LOW), enabled=False) == []


def test_a_dtype_without_fast_kernels_is_found_with_the_other_one_as_cure() -> None:
    old = {"architecture": "x86_64", "avx512_bf16": True}
    dots = [op("linear", i, came="float16", gave="float16", dot=True) for i in range(2)]
    low = [op("linear", 2, came="bfloat16", gave="bfloat16", dot=True)]
    add = [op("add", 3, came="float16", gave="float16")]

    def slow(dtype: str, device: str) -> str:
        return slow_on_cpu(dtype, old if device == "cpu" else {})

    [finding] = slow_dtypes(Recording(dots + low + add), slow, device="cpu")
    assert finding.message.startswith(
        "2 matrix products and convolutions ran in float16 on cpu, which is slow here: this"
    )
    assert finding.advice == "mezzo.torch.autocast('cpu', dtype=torch.bfloat16)"
    assert [*slow_dtypes(Recording(dots), slow, device="cuda")] == []


def test_a_machine_that_is_slow_in_both_is_told_to_run_without() -> None:
    dot = op("linear", came="float16", gave="float16", dot=True)
    [finding] = slow_dtypes(Recording([dot]), lambda dtype, device: "no kernels", device="cpu")
    assert finding.advice == "run without autocast here"


def test_layers_that_fall_to_float32_are_one_finding() -> None:
    ops = [
        op("softmax.int", i, rule="fp32", came="float16", used="float32", gave="float32", path=f"blocks.{i}.attn")
        for i in range(4)
    ]
    finding = only("float32 memory", *ops)
    assert (finding.path, finding.count) == (("blocks.*.attn",), 4)
    assert "{'blocks.*.attn': {'softmax': 'lower_precision_fp'}}" in finding.advice


def test_outside_of_modules_the_cure_is_a_policy() -> None:
    finding = only("float32 memory", op("softmax.int", rule="fp32", came="float16", gave="float32", path=""))
    assert finding.advice.endswith("policy=mezzo.builtin_policy('default').override({'softmax': 'lower_precision_fp'})")
    assert (
        mezzo.builtin_policy("default").override({"softmax": "lower_precision_fp"}).rule("softmax")
        == "lower_precision_fp"
    )
