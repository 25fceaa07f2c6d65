"""DistributedDataParallel: gradients are averaged in `backward`, so what is non-finite on one rank is so on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mezzo.torch import GradScaler

from .processes import Ranks
from .training import INF, NUMBERS, OVERFLOWS, assert_near, assert_same, batch, build, mean_square, train, values

pytestmark = pytest.mark.slow  # the first one waits for the processes

HALF = {0: slice(0, 4), 1: slice(4, 8)}


def halves(rank: int) -> dict[str, Any]:
    """Each rank has half of the batch, and the loss of rank 1 overflows."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(step: int) -> torch.Tensor:
        factor = INF if rank == 1 and step in OVERFLOWS else 1.0
        return mean_square(model, batch(step, HALF[rank])) * factor

    return {**train(GradScaler("cpu", **NUMBERS), optimizer, loss), "parameters": values(model)}


def float16(rank: int) -> dict[str, Any]:
    """All ranks have the whole batch, in a float16 region, clip, and rank 0 overflows in float16 itself."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", **NUMBERS)

    def loss(step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(batch(step))
        factor = 70000.0 if rank == 0 and step in OVERFLOWS else 1.0
        return (output * torch.tensor(factor).to(torch.float16)).float().square().mean()

    def clip(step: int) -> None:
        scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(model.parameters(), 0.05)

    return {**train(scaler, optimizer, loss, clip), "parameters": values(model)}


def accumulated(rank: int) -> dict[str, Any]:
    """Two micro-batches per step, the first of them without communication, where rank 1 overflows."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", **NUMBERS)

    def loss(step: int) -> torch.Tensor:
        factor = INF if rank == 1 and step in OVERFLOWS else 1.0
        with model.no_sync():
            scaler.scale(mean_square(model, batch(step)) * factor).backward()
        return mean_square(model, batch(step + 50))

    return {**train(scaler, optimizer, loss), "parameters": values(model)}


CHECKS = [halves, float16, accumulated]


def test_an_overflow_in_the_loss_of_one_rank_makes_all_skip(ranks: Ranks) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = train(
        torch.amp.GradScaler("cpu", **NUMBERS),
        optimizer,
        lambda step: mean_square(model, batch(step)) * (INF if step in OVERFLOWS else 1.0),
    )
    # The mean over two halves is not summed in the order of the mean over the whole.
    result = assert_same(ranks["halves"])
    assert_near(result, {**reference, "parameters": values(model)}, rtol=1e-5, atol=1e-6)


def test_float16_with_clipping_gives_the_parameters_of_one_process(ranks: Ranks) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", **NUMBERS)

    def loss(step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(batch(step))
        factor = 70000.0 if step in OVERFLOWS else 1.0
        return (output * torch.tensor(factor).to(torch.float16)).float().square().mean()

    def clip(step: int) -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    reference = train(scaler, optimizer, loss, clip)
    # The mean of two equal gradients is the gradient, so nothing differs.
    assert_near(assert_same(ranks["float16"]), {**reference, "parameters": values(model)})


def test_an_overflow_before_the_last_micro_batch_is_seen_by_all(ranks: Ranks) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", **NUMBERS)

    def loss(step: int) -> torch.Tensor:
        scaler.scale(mean_square(model, batch(step)) * (INF if step in OVERFLOWS else 1.0)).backward()
        return mean_square(model, batch(step + 50))

    reference = train(scaler, optimizer, loss)
    assert_near(assert_same(ranks["accumulated"]), {**reference, "parameters": values(model)}, rtol=1e-6, atol=1e-7)
