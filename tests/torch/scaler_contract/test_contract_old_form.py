"""The contract's first form, `step(grad_scaler=)`: as PyTorch still serves it, with its warning."""

from __future__ import annotations

import warnings

import pytest
import torch

from mezzo.torch import GradScaler

from .optimizers import OldForm, backward, parameter

OLD_FORM = r"^GradScaler is going to stop passing itself as a keyword argument to the passed optimizer\."


@pytest.mark.parametrize("scheduled", [False, True], ids=["bare", "under a scheduler"])
def test_the_old_form_is_passed_the_scaler(scheduled: bool) -> None:
    weight = parameter()
    optimizer = OldForm([weight], lr=0.5)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 100)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight, 2.0)
    with pytest.warns(FutureWarning, match=OLD_FORM) as caught:
        assert scaler.step(optimizer) == "stepped"
    assert [one.filename for one in caught] == [__file__]
    scaler.update()
    assert optimizer.scalers == [scaler]
    assert weight.tolist() == [0.0, 1.0]
    assert scaler.stepped(optimizer)


def test_the_old_form_sees_an_overflow_and_the_scale_backs_off() -> None:
    weight = parameter()
    optimizer = OldForm([weight])
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, weight, float("inf"))
    with pytest.warns(FutureWarning, match=OLD_FORM):
        assert scaler.step(optimizer) == "skipped"
    scaler.update()
    assert weight.tolist() == [1.0, 2.0]
    assert scaler.get_scale() == 4.0
    assert not scaler.stepped(optimizer)


def test_the_old_form_warns_with_pytorchs_text() -> None:
    texts = []
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        weight = parameter()
        backward(scaler, weight)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler.step(OldForm([weight]))
        texts.append([str(one.message) for one in caught])
    assert texts[0] == texts[1] != []
