"""Optimizers that evaluate the loss themselves. Apex's O2 refused them; O1 stepped with Inf."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mezzo.apex import amp

from .nets import LEVELS, loss_of, net, plant, sgd, start, state_of


def lbfgs(model: torch.nn.Module) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def closure_for(model: Any, optimizer: Any, overflow_at: int = -1) -> Any:
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if len(calls) == overflow_at:
                plant(optimizer)
        calls.append(loss.item())
        return loss

    closure.calls = calls  # type: ignore[attr-defined]
    return closure


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [lbfgs, sgd])
def test_a_closure_trains(level: str, kind: Any) -> None:
    model, optimizer = start(level, optimizer=kind, loss_scale=256.0)
    first = optimizer.step(closure_for(model, optimizer)).item()
    for _ in range(8):
        last = optimizer.step(closure=closure_for(model, optimizer)).item()
    assert last < 0.8 * first


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kind", "at"), [(sgd, 0), (lbfgs, 0), (lbfgs, 2)])
def test_a_step_whose_closure_overflows_is_undone(level: str, kind: Any, at: int) -> None:
    model, optimizer = start(level, optimizer=kind, loss_scale="dynamic")
    amp._amp_state.loss_scalers[0]._loss_scale = 256.0
    optimizer.step(closure_for(model, optimizer))
    before = state_of(model, optimizer)
    closure = closure_for(model, optimizer, overflow_at=at)
    optimizer.step(closure)
    assert len(closure.calls) == at + 1
    after = state_of(model, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert amp._amp_state.loss_scalers[0].loss_scale() == 128.0
    optimizer.step(closure_for(model, optimizer))
    assert not all(torch.equal(one, other) for one, other in zip(before, state_of(model, optimizer), strict=True))


def test_the_model_is_evaluated_with_casts_on() -> None:
    model = net()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=64.0, verbosity=0)
    seen = []

    def closure() -> torch.Tensor:
        seen.append(model[0](torch.ones(1, 8)).dtype)
        return loss_of(model)

    optimizer.step(closure)
    assert seen == [torch.float16]


def test_an_overflow_before_the_step_is_forgotten_when_the_closure_starts_anew() -> None:
    model, optimizer = start("O2", loss_scale=256.0)
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        plant(optimizer)
    before = state_of(model, optimizer)
    optimizer.step(closure_for(model, optimizer))
    after = state_of(model, optimizer)
    assert all(one.isfinite().all() for one in after)
    assert not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
