"""That a call is refused with a certain text, and has changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.errors import PreparationError

from .runs import differing, net, snapshot, train

Optimizer = torch.optim.Optimizer


def check_refused(
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


def trained() -> tuple[nn.Sequential, Optimizer]:
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
