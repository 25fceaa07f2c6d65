"""The parts: local tensors, meshes, and the maximum of flags over groups of ranks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mezzo.errors import ScalingError
from mezzo.torch.agreement import agree_, check_process_group, has_partial, local, meshes

from .processes import Ranks, run


def grid(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def agreed(rank: int, flags: list[float], meshes: Any = (), group: Any = None) -> list[float]:
    found = torch.tensor([flag if rank == 1 + index else 0.0 for index, flag in enumerate(flags)])
    agree_(found, meshes, group)
    return found.tolist()


def over_every_dimension(rank: int) -> dict[str, list[float]]:
    """Of four ranks in a grid, rank 1 has the first flag, rank 2 the second and rank 3 the third."""
    whole = grid((2, 2), ("row", "column"))
    solo = dist.new_group([0, 1, 2, 3])
    flags = [1.0, 2.0, 0.5]
    return {
        "mesh": agreed(rank, flags, (whole,)),
        "two meshes": agreed(rank, flags, (whole["column"], whole["row"])),
        "mesh and its part": agreed(rank, flags, (whole, whole["row"])),
        "mesh and group": agreed(rank, flags, (whole["column"],), whole.get_group("row")),
        "group": agreed(rank, flags, (), solo),
        "row": agreed(rank, flags, (whole["row"],)),
        "column": agreed(rank, flags, (whole["column"],)),
        "nothing": agreed(rank, flags),
    }


def collectives(rank: int) -> dict[str, int]:
    """How many reductions are made."""
    whole = grid((2, 2), ("row", "column"))
    counts = {}
    for name, parts, group in [
        ("mesh", (whole,), None),
        ("mesh and its parts", (whole, whole["row"], whole["column"]), whole.get_group("row")),
        ("group of one", (), dist.new_group([rank], use_local_synchronization=True)),
    ]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            agree_(torch.zeros(2), parts, group)
        counts[name] = sum(event.count for event in profile.key_averages() if event.key == "c10d::allreduce_")
    return counts


def outside(rank: int) -> dict[str, Any]:
    """A mesh of ranks 0 and 1: the others are not in it, and do not wait."""
    from torch.distributed.device_mesh import DeviceMesh

    part = DeviceMesh("cpu", [0, 1])
    group = dist.new_group([0, 1])
    try:
        text = "" if check_process_group(group) is group else "another"
    except ScalingError as error:
        text = str(error)
    return {"found": agreed(rank, [1.0, 1.0, 1.0], (part,)), "text": text}


def parts(rank: int) -> dict[str, Any]:
    """What `local` and `meshes` give of DTensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = grid((2, 2), ("row", "column"))
    row = whole["row"]
    both = distribute_tensor(torch.arange(16.0).reshape(4, 4), whole, [Shard(0), Shard(1)])
    lines = nn.Parameter(distribute_tensor(torch.ones(1, 3), row, [Shard(0)]))
    promised = both.redistribute(whole, [Replicate(), Replicate()], async_op=True)
    promise = type(promised._local_tensor).__name__
    kept = local(promised).tolist()
    held = local(both)
    held.mul_(2.0)
    return {
        "meshes": [mesh.ndim for mesh in meshes([nn.Parameter(torch.ones(1)), lines, both, lines])],
        "in order": meshes([both, lines]) == (whole, row),
        "sum": float(both.full_tensor().sum()),
        "type": (promise, type(local(promised)).__name__, type(held).__name__),
        "promised": kept,
        "elements": local(lines).numel(),
        "parameter": local(lines).data_ptr() == lines._local_tensor.data_ptr(),
        "grad_fn": local(lines * 2.0).grad_fn is None,
    }


def sums(rank: int) -> list[bool]:
    """Which gradients are sums that nobody has taken."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    row = grid((2, 2), ("row", "column"))["row"]
    weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), row, [Replicate()]))
    plain = nn.Parameter(torch.ones(2))
    seen = [has_partial([plain, weight])]
    for placement in (Replicate(), Shard(0)):
        weight.grad = None
        (distribute_tensor(torch.ones(4, 2), row, [placement]) @ weight).full_tensor().sum().backward()
        seen.append(has_partial([plain, weight]))
    return seen


CHECKS = [over_every_dimension, collectives, outside, parts, sums]


@pytest.fixture(scope="module")
def four() -> Ranks:
    return run(__name__, world=4)


@pytest.mark.slow
def test_flags_are_the_maximum_over_every_dimension_and_group(four: Ranks) -> None:
    results = four["over_every_dimension"]
    for result in results:
        for name in ("mesh", "two meshes", "mesh and its part", "mesh and group", "group"):
            assert result[name] == [1.0, 2.0, 0.5], name
    assert [result["row"] for result in results] == [[0.0, 2.0, 0.0], [1.0, 0.0, 0.5]] * 2
    assert [result["column"] for result in results] == [[1.0, 0.0, 0.0]] * 2 + [[0.0, 2.0, 0.5]] * 2
    assert [result["nothing"] for result in results] == [[0.0] * 3, [1.0, 0, 0], [0, 2.0, 0], [0, 0, 0.5]]


@pytest.mark.slow
def test_each_group_is_asked_once_and_a_group_of_one_never(four: Ranks) -> None:
    for result in four["collectives"]:
        assert result == {"mesh": 2, "mesh and its parts": 2, "group of one": 0}


@pytest.mark.slow
def test_a_rank_outside_a_mesh_or_group_is_left_alone_or_told(four: Ranks) -> None:
    results = four["outside"]
    assert [result["found"] for result in results] == [[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]]
    assert [result["text"] for result in results[:2]] == ["", ""]
    for result in results[2:]:
        assert "pass None there" in result["text"]


@pytest.mark.slow
def test_local_tensors_share_memory_and_meshes_are_listed_once(four: Ranks) -> None:
    whole = torch.arange(16.0).reshape(4, 4)
    for rank, result in enumerate(four["parts"]):
        assert result["meshes"] == [1, 2]
        assert result["in order"]
        assert result["sum"] == 2.0 * float(whole.sum())
        assert result["type"] == ("AsyncCollectiveTensor", "Tensor", "Tensor")
        assert result["promised"] == whole.tolist()
        assert result["elements"] == (3 if rank < 2 else 0)
        assert result["parameter"]
        assert result["grad_fn"]


@pytest.mark.slow
def test_gradients_whose_sum_is_not_taken_are_noticed(four: Ranks) -> None:
    assert four["sums"] == [[False, False, True]] * 4


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("world", "got 'world' of type str. Pass torch.distributed.group.WORLD"),
        (0, "got 0 of type int. Pass torch.distributed.group.WORLD"),
        ([0, 1], "what torch.distributed.new_group returned, after init_process_group"),
        (dist.GroupMember.NON_GROUP_MEMBER, "new_group returns on a rank outside the group: pass None there"),
    ],
)
def test_what_is_no_process_group_is_refused(wrong: object, text: str) -> None:
    with pytest.raises(
        ScalingError, match=r"^process_group has to be a torch\.distributed\.ProcessGroup or None"
    ) as caught:
        check_process_group(wrong)
    assert text in str(caught.value)
    assert check_process_group(None) is None


def test_a_plain_gradient_is_its_own_local_part() -> None:
    for gradient in (torch.ones(2), torch.ones(2).to_sparse(), nn.Parameter(torch.ones(2))):
        assert local(gradient) is gradient
    assert meshes(iter(nn.Linear(2, 2).parameters())) == ()


def test_flags_without_mesh_or_group_stay_as_they_are() -> None:
    found = torch.tensor([0.0, 1.0])
    agree_(found, (), None)
    assert found.tolist() == [0.0, 1.0]


SCRIPT = """
import sys
import torch
from mezzo.torch.agreement import agree_, check_process_group, local, meshes
local(torch.ones(1)), local(torch.nn.Parameter(torch.ones(1))), meshes(torch.nn.Linear(1, 1).parameters())
agree_(torch.zeros(1), (), check_process_group(None))
print("torch.distributed.tensor" in sys.modules)
"""


def test_nothing_of_distributed_tensors_is_imported_for_plain_ones() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.strip() == "False", done.stderr
