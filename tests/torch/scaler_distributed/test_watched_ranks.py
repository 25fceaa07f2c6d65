"""`explain` and `find_nonfinite` under DDP and FSDP2: names without wrappers, the rank, gradients as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.torch import autocast, explain, find_nonfinite

from .processes import Ranks

pytestmark = pytest.mark.slow  # the first one waits for the processes


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def step(net: nn.Module, x: Tensor) -> None:
    with autocast("cpu", dtype=torch.bfloat16):
        loss = net(x).float().square().sum()
    loss.backward()


def under_ddp(rank: int) -> dict[str, Any]:
    """One step, watched and not."""
    x = torch.full((2, 4), float(rank + 1))
    plain, seen = DistributedDataParallel(model()), DistributedDataParallel(model())
    step(plain, x)
    with explain(seen) as explained, find_nonfinite(seen) as found:
        step(seen, x)
    gradients = zip(plain.parameters(), seen.parameters(), strict=True)
    return {
        "same": all(torch.equal(a.grad, b.grad) for a, b in gradients if a.grad is not None and b.grad is not None),
        "paths": sorted({record.path for record in explained.report.records if record.dot}),
        "ranks": {record.rank for record in explained.report.records},
        "settings": explained.report.regions[0].settings["rank"],
        "found": str(found.first),
        "phases": {record.phase for record in explained.report.records},
    }


def overflow_on_one_rank(rank: int) -> dict[str, Any]:
    """Only rank 1 overflows; the gradients of both are not finite, and only rank 1 has the op."""
    net = DistributedDataParallel(model())
    with find_nonfinite(net) as found:
        step(net, torch.full((2, 4), 1.0 if rank == 0 else 1e30))
    first = found.first
    return {
        "first": None if first is None else (first.op, first.phase, first.rank, first.cause_kind),
        "parameters": sorted(one.name for one in found.parameters),
    }


def under_fsdp(rank: int) -> dict[str, Any]:
    """One step of a sharded model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    with explain(net) as explained, find_nonfinite(net) as found:
        step(net, torch.ones(2, 4))
    dots = [record for record in explained.report.records if record.dot]
    return {
        "paths": sorted({record.path for record in dots}),
        "used": {dtype for record in dots for dtype in record.used},
        "found": str(found.first),
        "faults": [note for note in explained.report.notes if "could not" in note],
    }


def test_under_ddp_names_are_the_models_and_records_have_the_rank(ranks: Ranks) -> None:
    for rank, seen in enumerate(ranks["under_ddp"]):
        assert seen == {
            "same": True,
            "paths": [("0",), ("2",)],
            "ranks": {rank},
            "settings": str(rank),
            "found": "None",
            "phases": {"forward", "backward"},
        }


def test_the_rank_that_overflows_has_the_op_and_the_other_the_parameters(ranks: Ranks) -> None:
    first, second = ranks["overflow_on_one_rank"]
    names = ["0.weight", "2.weight"]
    assert second == {"first": ("aten::pow", "forward", 1, "unknown"), "parameters": names}
    # What DDP has added up comes to this rank from nowhere.
    assert first == {"first": ("aten::copy_", "backward", 0, "came in"), "parameters": names}


def test_a_sharded_model_is_seen(ranks: Ranks) -> None:
    for seen in ranks["under_fsdp"]:
        assert seen == {"paths": [("0",), ("2",)], "used": {"bfloat16"}, "found": "None", "faults": []}


CHECKS: list[Callable[[int], Any]] = [under_ddp, overflow_on_one_rank, under_fsdp]
