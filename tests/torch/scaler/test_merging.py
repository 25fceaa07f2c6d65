"""A scaler per loss: gradients merged with `merge`, stepped with once by `step_merged`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import ScalerProtocolError, SkippedStepsError
from mezzo.torch import GradScaler, NonFinite, step_merged

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "for-loop": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9, foreach=False),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9, fused=True),
}
optimizers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def two_scalers(**options: Any) -> list[GradScaler]:
    return [GradScaler("cpu", init_scale=4.0, **options), GradScaler("cpu", init_scale=64.0, **options)]


def merge(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    with scaler.merge(optimizer):
        scaler.scale(loss).backward()


@optimizers
def test_the_step_is_that_of_the_sum_of_the_losses(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    weight, plain = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, reference, scalers = make([weight]), make([plain]), two_scalers()
    for factor in (1.0, -2.0, 3.0):
        optimizer.zero_grad()
        merge(scalers[0], optimizer, weight.square().sum())
        merge(scalers[1], optimizer, (factor * weight).sum())
        step_merged(optimizer, scalers)
        for scaler in scalers:
            scaler.update()
        reference.zero_grad()
        (plain.square().sum() + (factor * plain).sum()).backward()
        reference.step()
    assert torch.equal(weight, plain)
    assert all(scaler.steps_taken(optimizer) == 3 for scaler in scalers)


@optimizers
@pytest.mark.parametrize("bad", [0, 1])
def test_one_losss_overflow_skips_the_step_and_moves_its_own_scale_alone(
    make: Callable[[Any], torch.optim.Optimizer], bad: int
) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scalers = make([weight]), two_scalers(growth_interval=1)
    for index, scaler in enumerate(scalers):
        merge(scaler, optimizer, (weight * (torch.inf if index == bad else 1.0)).sum())
    step_merged(optimizer, scalers)
    assert [scaler.stepped(optimizer) for scaler in scalers] == [False, False]
    assert scalers[bad].nonfinite(optimizer) == (NonFinite("param_groups[0]['params'][0]", 0, 3, 3, "float32"),)
    for scaler in scalers:
        scaler.update()
    assert torch.equal(weight, torch.ones(3))
    start = [4.0, 64.0]
    assert [scaler.get_scale() for scaler in scalers] == [
        value * (0.5 if index == bad else 2.0) for index, value in enumerate(start)
    ]


@pytest.mark.parametrize("order", [[torch.inf, 1.0], [1.0, torch.inf]])
def test_each_of_several_merges_of_one_scaler_counts(order: list[float]) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu", init_scale=4.0)
    for factor in order:
        merge(scaler, optimizer, (weight * factor).sum())
    step_merged(optimizer, scaler)
    scaler.update()
    assert torch.equal(weight, torch.ones(3))
    assert scaler.get_scale() == 2.0


def test_an_exception_in_the_region_leaves_the_gradients_as_they_were() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scalers = torch.optim.SGD([weight], lr=0.5), two_scalers()
    merge(scalers[0], optimizer, weight.sum())
    before = weight.grad
    with pytest.raises(ZeroDivisionError), scalers[1].merge(optimizer):
        scalers[1].scale(weight.sum()).backward()
        _ = 1 / 0
    assert weight.grad is before
    assert weight.grad.tolist() == [1.0] * 3
    merge(scalers[1], optimizer, weight.sum())
    step_merged(optimizer, scalers)
    assert weight.tolist() == [0.0] * 3


def test_gradients_that_nobody_scaled_are_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scalers = torch.optim.SGD([weight], lr=0.5), two_scalers()
    with pytest.raises(ScalerProtocolError, match=r"in which this scaler's scale\(\) was not called"):
        with scalers[0].merge(optimizer):
            scalers[1].scale(weight.sum()).backward()
    assert weight.grad is None


def test_sparse_gradients_are_added() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer, scalers = torch.optim.SGD(table.parameters(), lr=1.0), two_scalers()
    start = table.weight.detach().clone()
    for scaler in scalers:
        merge(scaler, optimizer, table(torch.tensor([1, 1, 3])).sum())
    step_merged(optimizer, scalers)
    expected = torch.zeros(5, 2)
    expected[1], expected[3] = 4.0, 2.0
    torch.testing.assert_close(start - table.weight.detach(), expected)


@pytest.mark.parametrize(
    ("scalers", "text"),
    [
        ([], "got none"),
        ([torch.amp.GradScaler("cpu")], "got a GradScaler of torch.amp.grad_scaler"),
    ],
)
def test_what_step_merged_takes(scalers: list[Any], text: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    with pytest.raises(ScalerProtocolError, match=text):
        step_merged(optimizer, scalers)


def test_a_scaler_that_has_merged_nothing_is_named() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scalers = torch.optim.SGD([weight], lr=0.5), two_scalers()
    merge(scalers[0], optimizer, weight.sum())
    with pytest.raises(ScalerProtocolError, match=r"Scaler 1 of step_merged\(\) has merged no gradients"):
        step_merged(optimizer, scalers)
    assert torch.equal(weight, torch.ones(3))


def test_merging_after_the_step_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu")
    merge(scaler, optimizer, weight.sum())
    step_merged(optimizer, [scaler])
    with pytest.raises(ScalerProtocolError, match=r"merge\(\) is being called after step\(\)"):
        merge(scaler, optimizer, weight.sum())


def test_too_many_skips_are_told_once_all_scalers_have_heard() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scalers = torch.optim.SGD([weight], lr=0.5), two_scalers(max_skipped=1)
    merge(scalers[0], optimizer, weight.sum() * torch.nan)
    merge(scalers[1], optimizer, weight.sum())
    with pytest.raises(SkippedStepsError, match="1 steps of SGD in a row"):
        step_merged(optimizer, scalers)
    for scaler in scalers:
        scaler.update()
        assert scaler.skipped_in_a_row(optimizer) == 1
    assert [scaler.get_scale() for scaler in scalers] == [2.0, 64.0]


def test_disabled_scalers_are_passed_over() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scalers = [GradScaler("cpu", enabled=False), GradScaler("cpu", init_scale=8.0)]
    for scaler in scalers:
        merge(scaler, optimizer, weight.sum())
    step_merged(optimizer, scalers)
    assert weight.tolist() == [0.0] * 3
