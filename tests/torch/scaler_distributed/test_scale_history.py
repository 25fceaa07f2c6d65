"""The history of a scale where gradients lie in shards: norms are those of all ranks, and nobody waits for a lone reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mezzo.torch import GradScaler
from mezzo.torch.scaling.scale_history import ScaleHistory

from .processes import Ranks
from .training import INF

pytestmark = pytest.mark.slow  # the first one waits for the processes


def sharded_norms(rank: int) -> dict[str, Any]:
    """Four gradients, two on each rank, of which rank 1 overflows in the second iteration."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", init_scale=8.0)
    computed, given = ScaleHistory(scaler, norms=True), ScaleHistory(scaler)
    parts = DTensor.from_local(torch.ones(()), mesh, [Partial()])
    for factors in ((1.0, 1.0), (1.0, INF), (3.0, 3.0)):
        weight.grad = None
        loss = (weight * distribute_tensor(torch.tensor(factors).repeat_interleave(2), mesh, [Shard(0)])).sum()
        scaler.scale(loss.full_tensor()).backward()
        if factors[0] == 3.0:
            scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            given.note_norm(parts)  # one over two ranks: not known here, and no reason to wait for the other
        scaler.step(optimizer)
        scaler.update()
    # Only one rank asks: nobody else has to take part.
    return {"computed": computed.as_dict(), "given": given.as_dict()} if rank == 0 else {}


def test_norms_of_shards_are_those_of_all_ranks(ranks: Ranks) -> None:
    found, nothing = ranks["sharded_norms"]
    assert nothing == {}
    assert found["computed"] == {
        "step": [0, 1, 2],
        "scale": [8.0, 8.0, 4.0],
        "skipped": [False, True, False],
        "norm": [2.0, INF, 6.0],
    }
    assert found["given"] == {**found["computed"], "norm": [None, None, 6.0]}


CHECKS: list[Callable[[int], Any]] = [sharded_norms]
