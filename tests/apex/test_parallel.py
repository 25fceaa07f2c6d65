"""Apex's DistributedDataParallel, Reducer and SyncBatchNorm, in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo.apex import amp
from mezzo.apex.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from mezzo.errors import AmpError
from tests.process_groups import end_process_group
from tests.torch.scaler_distributed.processes import Ranks, run

# What the two ranks do. Numbers are small powers of two, so sums and means are exact.


def gradient(rank: int, values: tuple[float, float] = (1.0, 4.0), dtype: Any = torch.float32, **options: Any) -> Tensor:
    """Give the gradient of a model, which is ``values[rank]`` on each rank by itself."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(dtype), **options)
    ddp(torch.full((1, 1), values[rank], dtype=dtype)).sum().backward()
    found: Tensor = ddp.module.weight.grad
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"gradient_average": False},
    "predivided": {"gradient_predivide_factor": 4.0},
    "predivided, old name": {"gradient_average_split_factor": 4.0},
    "predivided sum": {"gradient_predivide_factor": 4.0, "gradient_average": False},
    "in float32": {"allreduce_always_fp32": True},
    "without effect": {
        "message_size": 1,
        "delay_allreduce": True,
        "allreduce_trigger_params": [],
        "retain_allreduce_buffers": True,
        "num_allreduce_streams": 3,
        "prof": True,
    },
    "pytorch's": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
}
EXPECTED = {"sum": 5.0, "predivided sum": 1.25}


def gradients(rank: int) -> dict[str, float]:
    return {name: gradient(rank, **options).item() for name, options in OPTIONS.items()}


LARGE: dict[str, dict[str, Any]] = {
    "divided before": {"gradient_predivide_factor": 2.0},
    "divided after": {"gradient_predivide_factor": 0.5},
    "divided after, in float32": {"gradient_predivide_factor": 0.5, "allreduce_always_fp32": True},
    "sum in float32": {"gradient_average": False, "allreduce_always_fp32": True},
}


def large_gradients(rank: int) -> dict[str, tuple[float, torch.dtype]]:
    found = {name: gradient(rank, (60000.0, 60000.0), torch.float16, **options) for name, options in LARGE.items()}
    return {name: (one.item(), one.dtype) for name, one in found.items()}


def positions(rank: int) -> float:
    options = (1, True, None, None, False, False, 1, None, False)
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), *options)
    ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
    return float(ddp.module.weight.grad)


def parameters_and_buffers(rank: int) -> tuple[list[float], list[float], list[str]]:
    model = nn.BatchNorm1d(2)
    nn.init.constant_(model.weight, rank + 1.0)
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        ddp(torch.full((3, 2), 10.0 * rank))
    return model.weight.tolist(), model.running_mean.tolist(), list(ddp.state_dict())


def passes_of_ones_own(rank: int) -> list[float]:
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    found = []
    for switch in (ddp.disable_allreduce, ddp.enable_allreduce):
        switch()
        ddp.zero_grad()
        ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
        found.append(float(ddp.module.weight.grad))
    return found


def communicators(rank: int) -> tuple[float, int]:
    alone = [dist.new_group([one]) for one in range(2)][rank]
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), allreduce_communicators=([alone], [None]))
    ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
    return float(ddp.module.weight.grad), ddp.process_group.size()


# Scaled by the 2**16 of the start, a gradient of 1 is too large for float16.
SCALE: dict[str, Any] = {"max_loss_scale": 2.0**8}


def with_amp(rank: int) -> dict[str, tuple[list[float], list[float]]]:
    """Give master gradients after a scaled pass, and weights after the step."""
    found = {}
    for level, options in (("O1", {}), ("O2", {}), ("O2", {"gradient_average": False})):
        model = nn.Linear(2, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **SCALE)
        ddp = DistributedDataParallel(model, delay_allreduce=True, **options)
        with amp.scale_loss(ddp(torch.tensor([[1.0, 2.0 * rank]])).sum(), optimizer) as scaled:
            scaled.backward()
        (master,) = amp.master_params(optimizer)
        gradients = master.grad.tolist()[0]
        optimizer.step()
        found[f"{level} {sorted(options)}"] = gradients, model.weight.tolist()[0]
        amp.casts.stop()
    return found


def an_overflow(rank: int) -> tuple[list[float], float]:
    """On rank 1 alone the loss is infinite."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **SCALE)
    ddp = DistributedDataParallel(model)
    with amp.scale_loss(ddp(torch.ones(1, 1)).sum() * (math.inf if rank else 1.0), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    return model.weight.tolist()[0], amp.state_dict()["loss_scaler0"]["loss_scale"]


def reducers(rank: int) -> tuple[float, float, float, float | None]:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, rank + 3.0)
    reducer = Reducer(model)
    model.weight.grad = torch.full((1, 1), rank + 1.0)
    reducer.reduce()
    loose = torch.tensor([4.0 * rank])
    Reducer([loose]).reduce()
    bias = model.bias.grad
    return model.weight.item(), float(model.weight.grad), loose.item(), None if bias is None else bias.item()


def groups_of_ranks(rank: int) -> tuple[list[int], list[int], list[str]]:
    own, both = create_syncbn_process_group(1), create_syncbn_process_group(2)
    texts = []
    for size in (3, -1):
        try:
            create_syncbn_process_group(size)
        except AmpError as error:
            texts.append(str(error))
    return dist.get_process_group_ranks(own), dist.get_process_group_ranks(both), texts


def flat_calls(rank: int) -> dict[str, Any]:
    from mezzo.apex.parallel.distributed import flat_dist_call

    mine = [torch.full((2, 2), float(rank)), torch.full((3,), rank, dtype=torch.int64), torch.full((1,), 10.0 * rank)]
    means = [each.clone() for each in mine if each.is_floating_point()]
    flat_dist_call(means, dist.all_reduce)
    flat_dist_call(mine, dist.broadcast, (1,))
    return {"means": [each.tolist() for each in means], "broadcast": [each.tolist() for each in mine]}


CHECKS = [
    flat_calls,
    gradients,
    large_gradients,
    positions,
    parameters_and_buffers,
    passes_of_ones_own,
    communicators,
    with_amp,
    an_overflow,
    reducers,
    groups_of_ranks,
]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run(__name__)


# DistributedDataParallel


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_added_up_as_the_options_say(ranks: Ranks, name: str) -> None:
    assert [one[name] for one in ranks["gradients"]] == [EXPECTED.get(name, 2.5)] * 2


def test_options_say_where_float16_sums_are_divided(ranks: Ranks) -> None:
    half = torch.float16
    for found in ranks["large_gradients"]:
        assert found == {
            "divided before": (60000.0, half),
            "divided after": (math.inf, half),
            "divided after, in float32": (60000.0, half),
            "sum in float32": (math.inf, half),  # 120000, which float16 does not have
        }


def test_arguments_come_in_apexs_order(ranks: Ranks) -> None:
    """The ninth after the model is ``gradient_average``."""
    assert ranks["positions"] == [3.0, 3.0]


def test_parameters_are_those_of_the_first_rank_and_statistics_stay_each_ranks_own(ranks: Ranks) -> None:
    (first, mean, names), (second, other, _) = ranks["parameters_and_buffers"]
    assert first == second == [1.0, 1.0]
    assert mean == [0.0, 0.0]
    assert other == pytest.approx([1.9, 1.9])  # 10 % of 10, twice
    assert names[0] == "module.weight"


def test_adding_up_can_be_switched_off_and_on(ranks: Ranks) -> None:
    assert ranks["passes_of_ones_own"] == [[1.0, 1.5], [2.0, 1.5]]


def test_the_first_communicator_is_the_process_group(ranks: Ranks) -> None:
    assert ranks["communicators"] == [(1.0, 1), (2.0, 1)]


def test_gradients_of_amp_are_added_up_unscaled_on_all_ranks(ranks: Ranks) -> None:
    mean = [1.0, 1.0], [0.75, 0.75]
    both = [2.0, 2.0], [0.5, 0.5]
    for found in ranks["with_amp"]:
        assert found == {"O1 []": mean, "O2 []": mean, "O2 ['gradient_average']": both}


def test_an_overflow_of_one_rank_skips_the_step_of_all(ranks: Ranks) -> None:
    assert ranks["an_overflow"] == [([1.0], 2.0**7)] * 2


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    end_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_param": True}, "shared_param=True: Apex took no value for it either. .* leave it out."),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor is a positive number, got 0.0."),
        ({"gradient_predivide_factor": math.nan}, "gradient_predivide_factor is a positive number, got nan."),
        ({"gradient_average_split_factor": -1.0}, "gradient_predivide_factor is a positive number, got -1.0."),
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AmpError, match=message):
        DistributedDataParallel(nn.Linear(1, 1), **options)


def test_without_a_process_group_there_is_pytorchs_error() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        DistributedDataParallel(nn.Linear(1, 1))


@pytest.mark.usefixtures("one_rank")
def test_it_is_pytorchs_class_and_pytorch_warns_of_nothing() -> None:
    ddp = DistributedDataParallel(nn.Linear(1, 1), forward_sync_buffers=True)
    assert isinstance(ddp, nn.parallel.DistributedDataParallel)
    assert ddp.broadcast_buffers is True
    assert DistributedDataParallel(nn.Linear(1, 1)).broadcast_buffers is False


# Reducer


def test_calls_over_many_tensors_in_one_piece(ranks: Ranks) -> None:
    for found in ranks["flat_calls"]:
        assert found["means"] == [[[0.5, 0.5], [0.5, 0.5]], [5.0]]
        assert found["broadcast"] == [[[1.0, 1.0], [1.0, 1.0]], [1, 1, 1], [10.0]]


def test_a_reducer_averages_the_gradients_there_are(ranks: Ranks) -> None:
    assert ranks["reducers"] == [(3.0, 1.5, 2.0, None)] * 2


# Batch norms


def test_batch_norms_are_converted_to_pytorchs_with_what_they_hold() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-3), nn.Sequential(nn.BatchNorm1d(2)))
    nn.init.normal_(model[1].weight)
    model[1].running_mean.fill_(0.5)
    before, weight = model[1].state_dict(), model[1].weight
    converted = convert_syncbn_model(model)
    assert converted is model
    assert [type(model[1]), type(model[2][0])] == [nn.SyncBatchNorm] * 2
    assert model[1].weight is weight
    assert all(torch.equal(value, before[name]) for name, value in model[1].state_dict().items())
    assert model[1].eps == 1e-3


@pytest.mark.usefixtures("one_rank")
def test_the_process_group_is_handed_on() -> None:
    group = dist.new_group([0])
    assert convert_syncbn_model(nn.BatchNorm1d(2), process_group=group).process_group is group
    assert SyncBatchNorm(2, process_group=group).process_group is group


def test_sync_batch_norm_takes_apexs_arguments_and_computes_as_batch_norm_does() -> None:
    norm, plain = SyncBatchNorm(3, 1e-3, 0.5, True, True, None, False), nn.BatchNorm2d(3, 1e-3, 0.5)
    x = torch.randn(4, 3, 2, 2)
    assert torch.equal(norm(x), plain(x))
    assert torch.equal(norm.running_mean, plain.running_mean)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SyncBatchNorm(2, channel_last=True), "channel_last=True is not there.*torch.channels_last"),
        (lambda: SyncBatchNorm(2, fuse_relu=True), "fuse_relu=True is not there: .*torch.nn.functional.relu"),
        (lambda: convert_syncbn_model(nn.BatchNorm1d(2), channel_last=True), "channel_last=True is not there"),
    ],
)
def test_layouts_and_fusions_that_there_are_not_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(AmpError, match=message):
        call()


def test_ranks_are_grouped_by_neighbours(ranks: Ranks) -> None:
    for rank, (own, both, texts) in enumerate(ranks["groups_of_ranks"]):
        assert (own, both) == ([rank], [0, 1])
        assert texts == [f"group_size divides the number of ranks, 2; got {size}." for size in (3, -1)]
    assert create_syncbn_process_group(0) is None
