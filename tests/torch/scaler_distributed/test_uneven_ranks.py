"""Ranks that do not do the same: without gradients, without a loss, with fewer backward passes. All decide alike."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo.errors import ScalerProtocolError
from mezzo.torch import GradScaler

from .processes import Ranks
from .training import (
    INF,
    NUMBERS,
    OVERFLOWS,
    STEPS,
    assert_same,
    batch,
    build,
    expected,
    mean_square,
    spoil,
    train,
    usual,
    values,
)

pytestmark = pytest.mark.slow  # the first one waits for the processes


def of_all() -> GradScaler:
    return GradScaler("cpu", **NUMBERS, process_group=dist.group.WORLD)


def stages(rank: int) -> dict[str, Any]:
    """Each rank has a model of its own, as in a pipeline, and rank 1 has no gradients in every second iteration."""
    model = build() if rank == 0 else nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moved: list[bool] = []
    before: list[Tensor] = []

    def loss(step: int) -> Tensor | None:
        if before:
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, values(model), strict=True)))
        before[:] = values(model)
        return None if rank == 1 and step % 2 else mean_square(model, batch(step))

    def before_step(step: int) -> None:
        # Steps 5 and 11 are among those in which rank 1 has no gradients.
        if rank == 0 and step in OVERFLOWS:
            spoil(model.parameters(), INF)

    seen = train(of_all(), optimizer, loss, before_step)
    return {**seen, "parameters": values(model), "moved": moved}


def later_passes(rank: int) -> dict[str, Any]:
    """After `unscale_` rank 0 has one more backward pass, in which it overflows, and rank 1 has none."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = of_all()

    def before_step(step: int) -> None:
        scaler.unscale_(optimizer)
        if rank == 0:
            factor = INF if step in OVERFLOWS else 1.0
            scaler.scale(mean_square(model, batch(step + 50)) * factor).backward()

    seen = train(scaler, optimizer, lambda step: mean_square(model, batch(step)), before_step)
    return {**seen, "parameters": values(model)}


def without_a_loss(rank: int) -> dict[str, Any]:
    """The loss is on rank 1, the last stage; rank 0 gets scaled gradients from there and never calls `scale`."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = of_all()
    seen: dict[str, list[Any]] = {"scale": [], "tracker": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = mean_square(model, batch(step))
        seed = scaler.scale(torch.ones(())) if rank == 1 else torch.zeros(())
        dist.broadcast(seed, 1)
        loss.backward(seed)
        if rank == 0 and step in OVERFLOWS:
            spoil(model.parameters(), INF)
        scaler.step(optimizer)
        scaler.update()
        seen["scale"].append(scaler.get_scale())
        seen["tracker"].append(scaler._get_growth_tracker())
    return {**seen, "parameters": values(model)}


def copies(rank: int) -> dict[str, Any]:
    """A copy keeps the group, which cannot go into a file."""
    scaler = of_all()
    scaler.scale(torch.ones(()))
    copied = copy.deepcopy(scaler)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copied.scale(mean_square(model, batch(0))).backward()
    if rank == 1:
        spoil(model.parameters(), INF)
    copied.step(optimizer)
    copied.update()
    try:
        pickle.dumps(scaler)
    except ScalerProtocolError as error:
        return {"scale": copied.get_scale(), "text": str(error)}
    return {"scale": copied.get_scale(), "text": None}


CHECKS = [stages, later_passes, without_a_loss, copies]


def assert_by_the_rule(result: dict[str, Any]) -> None:
    rule = expected(usual())
    assert (result["scale"], result["tracker"]) == (rule["scale"], rule["tracker"])


def test_a_stage_without_gradients_takes_part_in_the_decision(ranks: Ranks) -> None:
    first, second = ranks["stages"]
    assert_by_the_rule(assert_same([first, second], parameters=False))
    assert first["moved"] == [step not in OVERFLOWS for step in range(STEPS - 1)]
    assert second["moved"] == [step not in OVERFLOWS and step % 2 == 0 for step in range(STEPS - 1)]


def test_a_rank_with_one_backward_pass_less_after_unscale_takes_the_same_decision(ranks: Ranks) -> None:
    assert_by_the_rule(assert_same(ranks["later_passes"], parameters=False))


def test_a_stage_that_never_calls_scale_has_the_scale_of_the_others(ranks: Ranks) -> None:
    assert_by_the_rule(assert_same(ranks["without_a_loss"]))


def test_a_copy_agrees_in_the_same_group_and_a_pickle_is_refused(ranks: Ranks) -> None:
    for result in ranks["copies"]:
        assert result["scale"] == 32.0
        assert "process_group cannot be pickled" in result["text"]
