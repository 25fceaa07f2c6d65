"""What `unprepare` refuses, in which words, and that nothing has changed then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mezzo.torch import prepare, unprepare

from .refusals import check_refused, trained
from .runs import SETTINGS, net, run, train

Optimizer = torch.optim.Optimizer


def test_a_model_that_is_not_prepared_has_nothing_to_undo() -> None:
    model, optimizer = trained()
    check_refused(lambda: unprepare(model, optimizer), "not prepared, so there is nothing to undo", model, optimizer)
    check_refused(lambda: unprepare(model), "not prepared, so there is nothing to undo", model, optimizer)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_optimizer_is_needed_to_undo(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, 1)
    if setting == "none":
        unprepare(model)  # the optimizer has the parameters themselves
        return
    match = r"4 masters of the model belong to an optimizer that was not given: call unprepare\(model, optimizer\)"
    check_refused(lambda: unprepare(model), match, model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    check_refused(lambda: unprepare(model, other), match, model, optimizer, other)


def test_all_optimizers_are_needed_to_undo() -> None:
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[3].parameters(), lr=0.1)
    prepare(model, [first, second])
    check_refused(
        lambda: unprepare(model, first), r"2 masters of the model.*with a list if there are", model, first, second
    )
    unprepare(model, [first, second])


def test_the_optimizer_of_another_model_does_not_undo() -> None:
    (model, optimizer), (other, theirs) = run(), run()
    both = nn.ModuleList([model, other])
    match = r"The optimizer has masters of another model. Give the optimizer that this model was prepared with"
    check_refused(lambda: unprepare(model, [optimizer, theirs]), match, both, optimizer, theirs)


@pytest.mark.parametrize("what", ["text", 3, net()])
@pytest.mark.parametrize("inference", [False, True])
def test_undoing_takes_optimizers_alone(what: Any, inference: bool) -> None:
    model: Any
    model, optimizers = (prepare(net()), []) if inference else (lambda pair: (pair[0], [pair[1]]))(run())
    match = rf"unprepare takes a torch.optim.Optimizer, or a list of them, got {type(what).__name__}"
    check_refused(lambda: unprepare(model, what), match, model, *optimizers)
    check_refused(lambda: unprepare(model, [what]), match, model, *optimizers)
