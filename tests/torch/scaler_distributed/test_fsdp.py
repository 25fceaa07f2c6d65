"""FSDP2 and tensor parallelism: each rank sees its shards only, so one may see what the other does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import GradScaler
from mezzo.torch.agreement import local, meshes

from .processes import Ranks
from .training import (
    INF,
    NUMBERS,
    OVERFLOWS,
    assert_near,
    assert_same,
    batch,
    build,
    mean_square,
    spoil,
    train,
    values,
)

pytestmark = pytest.mark.slow  # the first one waits for the processes


def spoiler(rank: int, on: int, parameters: list[nn.Parameter], value: float = INF) -> Callable[[int], None]:
    """Before some steps, spoil the gradients of one rank, and see that the other's are clean."""

    def before_step(step: int) -> None:
        if step in OVERFLOWS and rank == on:
            spoil(parameters, value)
        held = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        clean = all(bool(gradient.isfinite().all()) for gradient in held)
        assert clean == (step not in OVERFLOWS or rank != on)

    return before_step


def cpu_mesh(*shape: int, names: tuple[str, ...] = ("shard",)) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape or (2,), mesh_dim_names=names)


def sharded(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model, mesh=cpu_mesh())
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    half = batch_half(rank)
    seen = train(
        GradScaler("cpu", **NUMBERS),
        optimizer,
        lambda step: mean_square(model, batch(step, half)),
        spoiler(rank, 1, parameters),
    )
    return {**seen, "parameters": values(model), "meshes": len(meshes(parameters))}


def batch_half(rank: int) -> slice:
    return slice(4 * rank, 4 * rank + 4)


def sharded_and_clipped(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model, mesh=cpu_mesh())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu", **NUMBERS)
    norms: list[float] = []
    spoil_first = spoiler(rank, 0, parameters)

    def before_step(step: int) -> None:
        spoil_first(step)
        scaler.unscale_(optimizer)
        norm = scaler.clip_grad_norm_(parameters, 0.05)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    seen = train(scaler, optimizer, lambda step: mean_square(model, batch(step)), before_step)
    return {**seen, "parameters": values(model), "norms": norms}


class Lopsided(nn.Module):
    """Of ``narrow`` rank 1 holds nothing: one row cannot be divided among two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.narrow = nn.Linear(4, 1)

    def forward(self, data: Tensor) -> Tensor:
        return self.narrow(data)


def empty_shard(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = Lopsided()
    fully_shard(model, mesh=cpu_mesh())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    seen = train(
        GradScaler("cpu", **NUMBERS),
        optimizer,
        lambda step: mean_square(model, batch(step)),
        spoiler(rank, 0, parameters),
    )
    held = sum(local(parameter).numel() for parameter in parameters)
    return {**seen, "parameters": values(model), "held": held}


def sharded_float16(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = build(torch.float16)
    fully_shard(model, mesh=cpu_mesh())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    seen = train(
        GradScaler("cpu", **NUMBERS),
        optimizer,
        lambda step: mean_square(model, batch(step).half()),
        spoiler(rank, 1, parameters),
    )
    return {**seen, "parameters": values(model)}


def sharded_fused(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model, mesh=cpu_mesh())
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.01, fused=True)
    seen = train(
        GradScaler("cpu", **NUMBERS),
        optimizer,
        lambda step: mean_square(model, batch(step)),
        spoiler(rank, 1, parameters),
    )
    return {**seen, "parameters": values(model)}


def hybrid(rank: int) -> dict[str, Any]:
    """Two dimensions: replicated over one, sharded over the other; the two ranks are of either in turn."""
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model[0], mesh=cpu_mesh(1, 2, names=("replicate", "shard")))
    fully_shard(model[2], mesh=cpu_mesh(2, 1, names=("replicate", "shard")))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    seen = train(
        GradScaler("cpu", **NUMBERS),
        optimizer,
        lambda step: mean_square(model, batch(step)),
        spoiler(rank, 1, parameters),
    )
    return {**seen, "parameters": values(model), "meshes": len(meshes(parameters))}


def tensor_parallel(rank: int) -> dict[str, Any]:
    """DTensors without FSDP, next to a plain parameter that both ranks have."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = build()
    parallelize_module(model, cpu_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    gain = nn.Parameter(torch.ones(()))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([*parameters, gain], lr=0.1, foreach=False)
    seen = train(
        GradScaler("cpu", **NUMBERS),
        optimizer,
        lambda step: (model(batch(step)) * gain).square().mean(),
        spoiler(rank, 1, parameters),
    )
    return {**seen, "parameters": [*values(model), gain.detach().clone()]}


def without_gradients(rank: int) -> dict[str, Any]:
    """In some iterations nobody has gradients of DTensors, and in others rank 1 alone has dropped its own."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = cpu_mesh()
    parameter = nn.Parameter(distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def before_step(step: int) -> None:
        if rank == 1 and step % 2:
            parameter.grad = None
        elif rank == 0 and step in OVERFLOWS:
            spoil([parameter], INF)

    seen = train(
        GradScaler("cpu", **NUMBERS), optimizer, lambda step: (parameter * parameter).mean().full_tensor(), before_step
    )
    return {**seen, "parameters": [parameter.full_tensor().detach()]}


def summed_later(rank: int) -> list[dict[str, Any]]:
    """A gradient that is a sum over ranks which nobody has taken yet, and which float16 would not hold while scaled."""
    return [sum_later(fused=False), sum_later(fused=True)]


def sum_later(*, fused: bool) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = cpu_mesh()
    parameter = nn.Parameter(distribute_tensor(torch.ones(3, 4).half(), mesh, [Replicate()]))
    optimizer = torch.optim.Adam([parameter], lr=0.1, eps=1e-4, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**15)
    output = distribute_tensor(torch.ones(2, 4).half(), mesh, [Shard(0)]) @ parameter.t()
    scaler.scale(output.float().full_tensor().sum() * 1.5).backward()
    found = {
        "placement": type(parameter.grad.placements[0]).__name__,
        "part": float(parameter.grad.to_local().max()),
        "sum": float(parameter.grad.full_tensor().max()),
    }
    scaler.step(optimizer)
    return {**found, "stepped": scaler.stepped(optimizer), "value": float(parameter.detach().full_tensor().mean())}


CHECKS = [
    summed_later,
    sharded,
    sharded_and_clipped,
    empty_shard,
    sharded_float16,
    sharded_fused,
    hybrid,
    tensor_parallel,
    without_gradients,
]


def reference(
    optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    model: nn.Module | None = None,
    before_step: Callable[[list[nn.Parameter]], Callable[[int], None]] | None = None,
) -> dict[str, Any]:
    """What PyTorch's class gives in one process on the whole batches."""
    model = model or build()
    parameters = list(model.parameters())
    seen = train(
        torch.amp.GradScaler("cpu", **NUMBERS),
        optimizer_of(parameters),
        lambda step: mean_square(model, batch(step)),
        spoiler(0, 0, parameters),
    )
    return {**seen, "parameters": values(model)}


def test_an_inf_in_the_shard_of_one_rank_makes_all_skip(ranks: Ranks) -> None:
    result = assert_same(ranks["sharded"])
    assert result["meshes"] == 1
    # The mean over two halves is not summed in the order of the mean over the whole; Adam divides by small roots.
    assert_near(result, reference(lambda parameters: torch.optim.AdamW(parameters, lr=0.01)), rtol=1e-4, atol=1e-5)


def test_clipping_sharded_gradients_gives_norm_and_parameters_of_one_process(ranks: Ranks) -> None:
    model = build()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", **NUMBERS)
    norms: list[float] = []
    spoil_first = spoiler(0, 0, parameters)

    def before_step(step: int) -> None:
        spoil_first(step)
        scaler.unscale_(optimizer)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.05)))

    seen = train(scaler, optimizer, lambda step: mean_square(model, batch(step)), before_step)
    first, second = ranks["sharded_and_clipped"]
    assert first["norms"] == second["norms"]
    assert first["norms"] == pytest.approx(norms, rel=1e-5)
    assert_near(assert_same([first, second]), {**seen, "parameters": values(model)}, rtol=1e-5, atol=1e-6)


def test_a_rank_whose_shard_is_empty_decides_with_the_others(ranks: Ranks) -> None:
    first, second = ranks["empty_shard"]
    assert first["held"] > 0
    assert second["held"] == 0
    assert_near(
        assert_same([first, second]),
        reference(lambda parameters: torch.optim.SGD(parameters, lr=0.1), Lopsided()),
        rtol=1e-5,
        atol=1e-6,
    )


def test_float16_shards_are_unscaled_as_in_one_process(ranks: Ranks) -> None:
    model = build(torch.float16)
    parameters = list(model.parameters())
    seen = train(
        GradScaler("cpu", **NUMBERS),  # PyTorch's refuses gradients in float16
        torch.optim.SGD(parameters, lr=0.1),
        lambda step: mean_square(model, batch(step).half()),
        spoiler(0, 0, parameters),
    )
    # One unit in the last place of float16, for the sums of the reduction.
    assert_near(assert_same(ranks["sharded_float16"]), {**seen, "parameters": values(model)}, rtol=2e-3, atol=1e-3)


def test_a_fused_optimizer_gets_the_flag_of_all_ranks(ranks: Ranks) -> None:
    assert_near(
        assert_same(ranks["sharded_fused"]),
        reference(lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True)),
        rtol=1e-4,
        atol=1e-5,
    )


def test_every_dimension_of_every_mesh_is_agreed_over(ranks: Ranks) -> None:
    result = assert_same(ranks["hybrid"])
    assert result["meshes"] == 2
    assert_near(result, reference(lambda parameters: torch.optim.SGD(parameters, lr=0.1)), rtol=1e-5, atol=1e-6)


def test_tensor_parallel_parameters_next_to_a_plain_one(ranks: Ranks) -> None:
    model = build()
    gain = nn.Parameter(torch.ones(()))
    parameters = list(model.parameters())
    seen = train(
        torch.amp.GradScaler("cpu", **NUMBERS),
        torch.optim.SGD([*parameters, gain], lr=0.1),
        lambda step: (model(batch(step)) * gain).square().mean(),
        spoiler(0, 0, parameters),
    )
    assert_near(
        assert_same(ranks["tensor_parallel"]),
        {**seen, "parameters": [*values(model), gain.detach()]},
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_rank_without_gradients_takes_part_all_the_same(ranks: Ranks) -> None:
    model = nn.ParameterList([nn.Parameter(torch.arange(8.0))])
    (parameter,) = model

    def before_step(step: int) -> None:
        if step % 2:
            parameter.grad[4:] = 0.0  # a step of SGD by nothing, as by no gradient
        if step in OVERFLOWS:
            spoil([parameter], INF)

    seen = train(
        torch.amp.GradScaler("cpu", **NUMBERS),
        torch.optim.SGD([parameter], lr=0.1),
        lambda step: (parameter * parameter).mean(),
        before_step,
    )
    assert_near(assert_same(ranks["without_gradients"]), {**seen, "parameters": values(model)}, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_a_sum_that_is_taken_later_is_divided_before(ranks: Ranks, fused: bool) -> None:
    for results in ranks["summed_later"]:
        result = results[fused]
        assert (result["placement"], result["part"], result["sum"]) == ("Partial", 49152.0, INF)
        assert result["stepped"]
        # The first step of Adam is by its learning rate.
        assert result["value"] == pytest.approx(0.9, rel=1e-3)
