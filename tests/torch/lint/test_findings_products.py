"""Matrix products that were left in float32 inside of a model that computes its others low."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mezzo.report import Finding
from mezzo.torch import autocast, explain, set_precision

from .made import kinds, op


class Mlp(nn.Module):
    def __init__(self, off: bool) -> None:
        super().__init__()
        self.a, self.b, self.off = nn.Linear(8, 16), nn.Linear(16, 8), off

    def forward(self, x: Tensor) -> Tensor:
        if self.off:
            with autocast("cpu", enabled=False):
                return self.b(self.a(x.float()).relu())
        return self.b(self.a(x).relu())


class Block(nn.Module):
    def __init__(self, off: bool) -> None:
        super().__init__()
        self.proj, self.mlp = nn.Linear(8, 8), Mlp(off)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.proj(x))


def net(*off: int, blocks: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block(i in off) for i in range(blocks)))


def found(model: nn.Module, *, enabled: bool = True, evaluate: bool = False) -> list[Finding]:
    with explain(model=model) as explained:
        with autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            model(torch.ones(4, 8))
        if evaluate:
            model(torch.ones(4, 8))
    return [one for one in explained.report.warnings if one.kind == "float32 products"]


def test_blocks_that_switch_autocast_off_are_one_finding_with_names_and_bytes() -> None:
    [finding] = found(net(1, 2))
    assert (finding.path, finding.count) == (("*.mlp",), 4)
    # 4 rows: (16 + 8) x 4 bytes in each of two, of 4 x (8 + 16 + 8) x 2 bytes and these being twice as long.
    assert finding.message == (
        "addmm in '1.mlp', '2.mlp': matrix products in float32, because autocast is off there, where others run in "
        "bfloat16: 768 B of the 1.4 KiB that products of the forward pass write"
    )
    assert "enabled=False" in finding.advice
    assert finding.source is not None
    assert finding.source.file == __file__


@pytest.mark.parametrize("rule", ["fp32", {"linear": "fp32"}], ids=["module", "op"])
def test_a_rule_of_the_user_is_told_as_such(rule: object) -> None:
    model = net()
    set_precision(model, {"2": rule})  # type: ignore[dict-item]
    [finding] = found(model)
    assert finding.path == ("2",)
    assert "linear in '2': matrix products in float32, as asked for by the rule of aten::linear in the policy" in (
        finding.message
    )
    assert "mezzo.torch.set_precision" in finding.advice
    assert "enabled=False" not in finding.advice


def test_two_reasons_are_two_findings() -> None:
    model = net(1)
    set_precision(model, {"2.mlp": "fp32"})
    assert [finding.path for finding in found(model)] == [("1.mlp",), ("2.mlp",)]


def test_a_model_that_is_low_wholly_or_float32_wholly_is_not_found() -> None:
    assert found(net()) == []
    assert found(net(1), enabled=False) == []
    assert found(net(0, blocks=1), enabled=False) == []


def test_an_evaluation_outside_of_the_region_is_not_found() -> None:
    assert found(net(), evaluate=True) == []


def test_a_whole_recurrent_net_and_small_products_are_not_found() -> None:
    low = op("linear", 0, came="bfloat16", gave="bfloat16", rule="lower_precision_fp", dot=True, shape_out=(1000, 100))
    wide = {"came": "float32", "gave": "float32", "rule": "autocast off", "dot": True, "autocast": None, "path": "rope"}
    assert kinds(low, op("mm", 1, shape_out=(1000, 100), **wide)) == ["float32 products"]
    assert kinds(low, op("mm", 1, shape_out=(4, 4), **wide)) == []
    assert kinds(low, op("mkldnn_rnn_layer", 1, shape_out=(1000, 100), **wide)) == []
