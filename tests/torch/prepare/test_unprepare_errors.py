"""What `unprepare` refuses, in which words, and that nothing has changed then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.errors import PreparationError
from mezzo.torch import prepare, unprepare

from .runs import SETTINGS, differing, net, run, snapshot, train

Optimizer = torch.optim.Optimizer


def _refused(
    call: Callable[[], Any],
    match: str,
    model: nn.Module,
    *optimizers: Optimizer,
    kind: type[Exception] = PreparationError,
) -> None:
    """Check that a call raises an error of this text, and changes nothing about a model and its optimizers."""
    before = snapshot(model, *optimizers)
    with pytest.raises(kind, match=match) as caught:
        call()
    if kind is PreparationError:
        assert type(caught.value) is PreparationError
    assert differing(snapshot(model, *optimizers), before) == []


def _trained() -> tuple[nn.Sequential, Optimizer]:
    """Give a model and an optimizer with gradients, state and hooks of the user's own."""
    model = net()
    model.register_buffer("scale", torch.ones(3))
    model[0].register_forward_pre_hook(lambda _module, _args: None)
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": [*model[1].parameters(), *model[3].parameters()]}]
    )
    optimizer.register_step_post_hook(lambda *_: None)
    train(model, optimizer, 2)
    return model, optimizer


def test_a_model_that_is_not_prepared_has_nothing_to_undo() -> None:
    model, optimizer = _trained()
    _refused(lambda: unprepare(model, optimizer), "not prepared, so there is nothing to undo", model, optimizer)
    _refused(lambda: unprepare(model), "not prepared, so there is nothing to undo", model, optimizer)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_optimizer_is_needed_to_undo(setting: str) -> None:
    model, optimizer = run(**SETTINGS[setting])
    train(model, optimizer, 1)
    if setting == "none":
        unprepare(model)  # the optimizer has the parameters themselves
        return
    match = r"4 masters of the model belong to an optimizer that was not given: call unprepare\(model, optimizer\)"
    _refused(lambda: unprepare(model), match, model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    _refused(lambda: unprepare(model, other), match, model, optimizer, other)


def test_all_optimizers_are_needed_to_undo() -> None:
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[3].parameters(), lr=0.1)
    prepare(model, [first, second])
    _refused(lambda: unprepare(model, first), r"2 masters of the model.*with a list if there are", model, first, second)
    unprepare(model, [first, second])


def test_the_optimizer_of_another_model_does_not_undo() -> None:
    (model, optimizer), (other, theirs) = run(), run()
    both = nn.ModuleList([model, other])
    match = r"The optimizer has masters of another model. Give the optimizer that this model was prepared with"
    _refused(lambda: unprepare(model, [optimizer, theirs]), match, both, optimizer, theirs)


@pytest.mark.parametrize("what", ["text", 3, net()])
@pytest.mark.parametrize("inference", [False, True])
def test_undoing_takes_optimizers_alone(what: Any, inference: bool) -> None:
    model: Any
    model, optimizers = (prepare(net()), []) if inference else (lambda pair: (pair[0], [pair[1]]))(run())
    match = rf"unprepare takes a torch.optim.Optimizer, or a list of them, got {type(what).__name__}"
    _refused(lambda: unprepare(model, what), match, model, *optimizers)
    _refused(lambda: unprepare(model, [what]), match, model, *optimizers)
