"""`count_lost_updates` of prepared optimizers: what their masters store, and what waits in them."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch.masters.lost_updates import LostUpdates, count_lost_updates
from mezzo.torch.masters.prepare import prepare

from .test_lost_updates import SCALERS, counts


class Weights(nn.Module):
    """A model whose gradients are all 1."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))

    def forward(self) -> Tensor:
        return self.weight.sum()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> LostUpdates:
    with count_lost_updates(optimizer) as counted:
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
    return counted


MASTERS = pytest.mark.parametrize(
    ("options", "expected"),
    [
        # From 1.0 it takes the master 2 steps of 1e-3 to be nearer to the next bfloat16, 2**-8 away, than to 1.0; then
        # it stays nearest to that one up to the 5th. The steps from 0.01 are many of bfloat16's there.
        ({"masters": True}, (8, 0, 3)),
        ({"masters": "kahan"}, (8, 0, 3)),
        ({"masters": False}, (8, 4, 0)),
    ],
    ids=["masters", "kahan", "none"],
)


@MASTERS
@pytest.mark.parametrize("arguments", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_of_a_prepared_optimizer_the_stored_values_are_compared(
    options: dict[str, Any], expected: tuple[int, int, int], arguments: dict[str, bool]
) -> None:
    if arguments.get("fused") and options.get("masters") is False and "rounding" not in options:
        pytest.skip("PyTorch's fused SGD leaves low-precision parameters as they are on a CPU; prepare refuses it")
    model = Weights([1.0, 0.01])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, **arguments)
    prepare(model, optimizer, low="**", **options)
    counted = trained(model, optimizer, steps=4)
    assert counts(counted) == expected
    assert counted.steps == 4


@MASTERS
def test_prepared_within_the_block_it_counts_the_same(options: dict[str, Any], expected: tuple[int, int, int]) -> None:
    model = Weights([1.0, 0.01])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with count_lost_updates(optimizer) as counted:
        prepare(model, optimizer, low="**", **options)
        assert trained(model, optimizer, steps=4).by_parameter == {0: expected}
    assert counted.by_parameter == {0: expected}


def test_prepared_within_the_first_block_of_a_process_it_counts_the_same() -> None:
    # Global hooks are called in the order in which they came: mezzo's own must not come with `prepare`.
    script = """
import torch
import mezzo.torch
from mezzo.torch.masters.lost_updates import count_lost_updates
from mezzo.torch.masters.prepare import prepare
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with count_lost_updates(optimizer) as counted:
    prepare(model, optimizer)
    for _ in range(4):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
print(counted)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "LostUpdates(updates=4, lost=0, waiting=3, steps=4)"


def test_a_step_that_leaves_the_compensation_as_it_is_is_not_lost() -> None:
    model = Weights([1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prepare(model, optimizer, low="**", masters="kahan")
    assert counts(trained(model, optimizer, steps=1)) == (1, 0, 0)
    assert model.weight.item() == 0.5


@pytest.mark.parametrize(("masters", "stored"), [(True, True), ("kahan", True), (False, False)])
def test_rounded_by_chance_only_values_without_master_are_lost(masters: Any, stored: bool) -> None:
    many = 10_000
    model = Weights([1.0] * many)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    prepare(model, optimizer, low="**", masters=masters, rounding="stochastic")
    counted = trained(model, optimizer, steps=1)
    stay = counted.waiting if stored else counted.lost
    assert counts(counted) == ((many, 0, stay) if stored else (many, stay, 0))
    # 1e-3 is the share 0.256 of the step of 2**-8 below 1.0; a count is within 5 standard deviations of its mean.
    share = 1e-3 / 2.0**-8
    assert abs(stay - many * (1 - share)) <= 5 * (many * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("masters", [True, "kahan", False])
def test_what_is_written_between_steps_is_no_update(masters: Any) -> None:
    model = Weights([1.0, 0.01])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    prepare(model, optimizer, low="**", masters=masters)
    with count_lost_updates(optimizer) as counted:
        with torch.no_grad():
            model.weight.fill_(5.0)
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    assert (counts(counted), counted.steps) == ((0, 0, 0), 1)
    assert model.weight.tolist() == [5.0, 5.0]


def test_elements_that_only_momentum_moves_may_wait_without_an_update() -> None:
    model = Weights([1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    prepare(model, optimizer, low="**")
    with count_lost_updates(optimizer) as counted:
        for gradient in (1.0, 0.0):
            model.weight.grad = torch.full_like(model.weight, gradient)
            optimizer.step()
    assert counts(counted) == (1, 0, 2)


def test_parameters_that_stay_in_float32_are_counted_under_their_names() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = torch.optim.SGD(net.named_parameters(), lr=1e-4)
    with torch.no_grad():
        net[0].weight.fill_(1.0)
    prepare(net, optimizer, keep="0.bias")
    with count_lost_updates(optimizer) as counted:
        for one in net.parameters():
            one.grad = torch.ones_like(one)
        optimizer.step()
    assert counted.by_parameter == {
        "0.weight": (4, 0, 4),
        "0.bias": (2, 0, 0),
        "1.weight": (2, 0, 0),
        "1.bias": (2, 0, 0),
    }


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("masters", [True, "kahan", False])
def test_a_prepared_training_is_the_same_when_counted(masters: Any, rounding: Any) -> None:
    def train(counting: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        prepare(net, optimizer, masters=masters, rounding=rounding)
        with count_lost_updates(optimizer) if counting else nullcontext():
            for _ in range(5):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = net(torch.randn(4, 8)).square().sum()
                loss.backward()
                optimizer.step()
        return [one.detach() for one in net.parameters()]

    for one, other in zip(train(True), train(False), strict=True):
        assert torch.equal(one, other)


@SCALERS
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("masters", [True, "kahan"])
def test_a_step_of_a_prepared_optimizer_that_a_scaler_skips_counts_nothing(
    fused: bool, masters: Any, scaler_class: Any
) -> None:
    model = Weights([1.0, 0.01])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=fused)
    prepare(model, optimizer, low="**", dtype=torch.float16, masters=masters)
    scaler = scaler_class("cpu", init_scale=2.0)
    with count_lost_updates(optimizer) as counted:
        for factor in (1.0, torch.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(model() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    # Float16's step below 1.0 is 2**-11, whose half is passed by the third step of 1e-4; at 0.01 by each.
    assert (counts(counted), counted.steps) == ((4, 0, 2), 2)
