"""Numbers of `memory_report`, against sums by hand for a small model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mezzo.torch
from mezzo.errors import PreparationError
from mezzo.torch import MemoryReport, memory_report, prepare

from .runs import LOW, net, run, train

# net(): Linear(6, 12), LayerNorm(12), Linear(12, 3).
LINEAR = 6 * 12 + 12 + 12 * 3 + 3
NORM = 12 + 12
ALL = LINEAR + NORM
STEPS = 6 * 4
"""AdamW counts its steps in a float32 scalar per parameter."""


@pytest.mark.parametrize(
    ("options", "gradients", "masters"),
    [
        ({}, 2 * LINEAR + 4 * NORM, 4 * LINEAR),
        ({"grad_dtype": torch.float32}, 4 * ALL, 4 * LINEAR),
        ({"grad_dtype": LOW}, 2 * LINEAR + 4 * NORM, 4 * LINEAR),
        ({"rounding": "stochastic"}, 2 * LINEAR + 4 * NORM, 4 * LINEAR),
        ({"dtype": torch.float16}, 4 * ALL, 4 * LINEAR),
        ({"masters": "kahan"}, 2 * LINEAR + 4 * NORM, 2 * LINEAR),
        ({"masters": False, "rounding": "stochastic"}, 2 * LINEAR + 4 * NORM, 0),
    ],
    ids=str,
)
def test_bytes_of_a_run_with_adamw(options: dict[str, Any], gradients: int, masters: int) -> None:
    model, optimizer = run(**options)
    train(model, optimizer, 1, backwards=1)
    before, after = (report := memory_report(model, optimizer)).before, report.after
    assert (before.parameters, before.gradients, before.masters) == (4 * ALL, 4 * ALL, 0)
    assert before.optimizer_state == 2 * 4 * ALL + STEPS
    assert after.parameters == 2 * LINEAR + 4 * NORM
    assert after.gradients == gradients
    assert after.optimizer_state == 2 * 4 * ALL + STEPS
    assert after.masters == masters
    assert before.total == 4 * 4 * ALL + STEPS
    assert after.total == after.parameters + gradients + after.optimizer_state + masters


def test_bytes_of_a_run_without_masters() -> None:
    model, optimizer = run(masters=False)
    train(model, optimizer, 1)
    report = memory_report(model, optimizer)
    assert report.after.parameters == report.after.gradients == 2 * LINEAR + 4 * NORM
    assert report.after.optimizer_state == 2 * (2 * LINEAR + 4 * NORM) + STEPS
    assert report.after.masters == 0
    # Before, moments would be float32 too.
    assert report.before.optimizer_state == 2 * 4 * ALL + STEPS


@pytest.mark.parametrize(
    "options", [{}, {"grad_dtype": torch.float32}, {"masters": "kahan"}, {"masters": False}], ids=str
)
def test_bytes_are_those_of_the_tensors_that_are_there(options: dict[str, Any]) -> None:
    model, optimizer = run(**options)
    train(model, optimizer, 1, backwards=1)
    after = memory_report(model, optimizer).after
    assert after.parameters == sum(one.nbytes for one in model.parameters())
    assert after.gradients == sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)
    state = [one for each in optimizer.state.values() for one in each.values() if isinstance(one, torch.Tensor)]
    assert after.optimizer_state == sum(one.nbytes for one in state)


def test_sgd_without_momentum_has_no_state() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer)
    train(model, optimizer, 1)
    report = memory_report(model, optimizer)
    assert report.before.optimizer_state == report.after.optimizer_state == 0
    assert report.after.masters == 4 * LINEAR


def test_a_model_for_inference_has_parameters_alone() -> None:
    report = memory_report(prepare(net()))
    assert (report.before.parameters, report.after.parameters) == (4 * ALL, 2 * LINEAR + 4 * NORM)
    assert report.after.gradients == report.after.optimizer_state == report.after.masters == 0


def test_frozen_parameters_have_no_gradients() -> None:
    model = net().requires_grad_(False)
    model[3].requires_grad_(True)
    report = memory_report(*prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert report.before.gradients == 4 * (12 * 3 + 3)
    assert report.after.gradients == 2 * (12 * 3 + 3)


def test_several_optimizers_are_added_up() -> None:
    model = net()
    pair = [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(model[3].parameters())]
    prepare(model, pair)
    for each in pair:
        train(model, each, 1)
    report = memory_report(model, pair)
    first, last = 6 * 12 + 12, 12 * 3 + 3
    assert report.after.masters == 4 * (first + last)
    assert report.after.optimizer_state == 4 * first + 2 * 4 * last + 2 * 4
    assert memory_report(model, pair[0]).after.masters == 4 * first


def test_a_shared_weight_is_counted_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    report = memory_report(prepare(model))
    assert (report.before.parameters, report.after.parameters) == (64, 32)
    assert list(report.stored) == ["0.weight", "1.weight"]


def test_a_float64_weight_counts_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 4, bias=False).double())
    report = memory_report(prepare(model, low="0"))
    assert report.before.parameters == 2 * 16 * 8
    assert report.after.parameters == 16 * 2 + 16 * 8


def test_a_compiled_model_counts_as_the_one_inside() -> None:
    model, optimizer = run()
    train(model, optimizer, 1)
    assert memory_report(torch.compile(model, backend="eager"), optimizer) == memory_report(model, optimizer)


def test_a_copy_counts_as_the_original() -> None:
    pair = run()
    train(*pair, 1)
    assert memory_report(*copy.deepcopy(pair)) == memory_report(*pair)


def test_names_have_reasons() -> None:
    report = memory_report(prepare(net(), keep="3.bias"))
    assert isinstance(report, MemoryReport)
    assert report.stored == {
        "0.weight": "linear runs in lower precision",
        "0.bias": "linear runs in lower precision",
        "3.weight": "linear runs in lower precision",
    }
    assert report.kept == {
        "1.weight": "layer_norm does not run in lower precision",
        "1.bias": "layer_norm does not run in lower precision",
        "3.bias": "kept by '3.bias'",
    }


def test_the_table_has_a_row_per_kind_of_memory() -> None:
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.LayerNorm(100, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(model, optimizer)
    with mezzo.torch.autocast("cpu", dtype=LOW):
        model(torch.ones(2, 100)).sum().backward()
    optimizer.step()
    assert str(memory_report(model, optimizer)).splitlines() == [
        "bytes             before    after",
        "parameters        40,400   20,400",
        "gradients         40,400   20,400",
        "optimizer state   80,808   80,808",
        "masters                0   40,000",
        "total            161,608  161,608",
    ]


def test_reading_a_report_changes_nothing_of_the_run() -> None:
    model, optimizer = run()
    report = memory_report(model, optimizer)
    report.stored.clear()  # type: ignore[attr-defined]
    assert len(memory_report(model, optimizer).stored) == 4


def test_a_model_that_is_not_prepared_has_no_report() -> None:
    with pytest.raises(PreparationError, match=r"not prepared; call mezzo.torch.prepare\(model, optimizer\) first"):
        memory_report(net())


@pytest.mark.parametrize("what", ["text", 3, net()])
def test_what_is_no_optimizer_is_refused(what: Any) -> None:
    with pytest.raises(PreparationError, match=f"takes a torch.optim.Optimizer.*got {type(what).__name__}"):
        memory_report(prepare(net()), what)


@pytest.mark.parametrize("what", ["text", 3, None])
def test_what_is_no_module_is_refused(what: Any) -> None:
    with pytest.raises(TypeError, match=f"memory_report takes a torch.nn.Module, got {type(what).__name__}"):
        memory_report(what)
