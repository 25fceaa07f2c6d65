"""Steps that the device decided on are counted without asking it, and read when somebody wants to know."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from mezzo.errors import ScalerProtocolError
from mezzo.torch.scaling.history import History, Steps

MADE, SKIPPED = torch.tensor(0.0), torch.tensor(1.0)


def test_steps_decided_on_the_device() -> None:
    steps = Steps()
    steps.made(MADE)
    for found in (MADE, SKIPPED, SKIPPED, MADE, SKIPPED, SKIPPED, SKIPPED):
        steps.decided_on_device(found)
    assert steps.unread == 7
    assert (steps.in_a_row(), steps.taken(), steps.last_was_made()) == (3, 3, False)
    assert steps.unread == 0
    steps.decided_on_device(SKIPPED)
    assert steps.in_a_row() == 4
    steps.decided_on_device(MADE)
    assert (steps.last_was_made(), steps.taken(), steps.in_a_row()) == (True, 4, 0)


def test_both_kinds_of_steps_follow_each_other() -> None:
    steps = Steps()
    steps.decided_on_device(SKIPPED)
    assert steps.skipped(SKIPPED) == 2
    steps.decided_on_device(SKIPPED)
    assert steps.skipped(SKIPPED) == 4
    steps.made(MADE)
    assert (steps.taken(), steps.in_a_row()) == (1, 0)


def test_an_idle_step_was_not_made_and_breaks_no_run() -> None:
    steps = Steps()
    steps.skipped(SKIPPED)
    steps.idle()
    assert (steps.last_was_made(), steps.in_a_row()) == (False, 1)


def test_optimizers_are_not_kept_alive_and_not_taken_for_each_other() -> None:
    history = History()
    for _ in range(20):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        with pytest.raises(ScalerProtocolError, match="of which this scaler has seen no step"):
            history.seen(optimizer, "stepped()")
        history.of(optimizer).made(MADE)
        assert history.seen(optimizer, "stepped()").taken() == 1
        del optimizer
    gc.collect()
    assert history.all() == []
