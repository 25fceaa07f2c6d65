"""Mixtures of dtypes: told where float32 runs on until it is cast down again, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mezzo.report import Finding
from mezzo.torch import autocast, explain

from .made import kinds, op

LOW = torch.bfloat16


class Net(nn.Module):
    """A function between two layers; it is given what the first one makes, the input, and a table in float32."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.body(x), x, self.table))


def found(function: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype = LOW) -> list[Finding]:
    net = Net(function)
    with explain(model=net) as explained, autocast("cpu", dtype=dtype):
        net(torch.ones(4, 8))
    return [one for one in explained.report.warnings if one.kind == "mixed dtypes"]


def test_float32_that_runs_on_until_a_layer_casts_it_is_found_with_its_bytes() -> None:
    [finding] = found(lambda y, x, table: (y * table).relu())
    assert finding.path == ("(Net)",)
    # The product and the relu: 4 x 8 elements of 4 bytes each.
    assert finding.message == (
        "mul in '(Net)' mixes bfloat16 and float32, has no rule in the policy, and gives float32; relu run in float32 too "
        "(256 B with it), and then linear in 'head' casts it to bfloat16"
    )
    assert finding.advice.startswith("round the result of mul, right behind it: .to(torch.bfloat16)")


def test_the_cure_of_a_mixture_cures_it_and_changes_no_result() -> None:
    assert found(lambda y, x, table: (y * table).to(LOW).relu()) == []
    torch.manual_seed(0)
    x, net = torch.randn(4, 8), Net(lambda y, x, table: (y * table).relu())
    with autocast("cpu", dtype=LOW):
        before = net(x)
        net.function = lambda y, x, table: (y * table).to(LOW).relu()
        assert torch.equal(net(x), before)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, x, table: y * table,
        lambda y, x, table: (y + x).relu(),
        lambda y, x, table: (nn.functional.dropout(y, 0.0) + x.exp()).relu(),
        lambda y, x, table: nn.functional.layer_norm((y * table).relu(), (8,)),
        lambda y, x, table: (z := (y * table).relu()) + z.sum(),
        lambda y, x, table: (y * table).relu() + y,
        lambda y, x, table: y * torch.tensor(2.0),
        lambda y, x, table: y + torch.arange(8),
        lambda y, x, table: torch.cat((y, x)).relu(),
    ],
    ids=[
        *("nothing between", "a stream", "a stream behind a dropout", "a norm uses it", "a sum uses it"),
        *("it is added up further", "no dimension", "integers", "promote"),
    ],
)
def test_float32_that_is_meant_or_costs_nothing_is_not_found(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    assert found(function) == []


def test_a_mixture_that_is_small_or_that_a_rule_allows_is_not_found() -> None:
    mixed = {"came": "float16 float32", "gave": "float32"}
    rest = [
        op("relu", 1, came="float32", gave="float32", producers=(0,)),
        op("linear", 2, came="float32", used="float16", gave="float16", rule="lower_precision_fp", producers=(1,)),
    ]
    assert kinds(op("mul", 0, **mixed), *rest) == ["mixed dtypes"]
    assert kinds(op("mul", 0, rule="fallthrough", **mixed), *rest) == []
    large = op("linear", 3, came="float16", gave="float16", rule="lower_precision_fp", shape_out=(1000, 1000))
    assert kinds(op("mul", 0, **mixed), *rest, large) == []


def test_a_mixture_outside_of_a_region_is_not_found() -> None:
    with explain() as explained:
        (torch.ones(3, 3) * torch.ones(3, 3, dtype=LOW)).relu()
    assert explained.report.warnings == ()
