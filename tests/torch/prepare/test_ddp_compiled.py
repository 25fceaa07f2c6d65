"""Prepared models under DistributedDataParallel, compiled and copied."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mezzo.torch import prepare
from tests.torch.scaler_distributed.processes import Ranks, run

from .test_ddp import Check, adamw, assert_equal, assert_same_masters, build, loss_of, train


def compiled(rank: int, *, around: str, warm: bool = False) -> dict[str, Any]:
    """With ``warm`` the compiled model is called once before it is wrapped."""
    seen = {}
    for name in ("eager", "compiled"):
        model: Any = build(seed=rank)
        optimizer = adamw(model)
        prepare(model, optimizer)
        inside = torch.compile(model, backend="aot_eager") if (name, around) == ("compiled", "model") else model
        if warm:
            loss_of(inside, rank, 0).backward()
            optimizer.zero_grad()
        ddp: Any = DistributedDataParallel(inside)
        if (name, around) == ("compiled", "ddp"):
            ddp = torch.compile(ddp, backend="aot_eager")
        seen[name] = train(ddp, optimizer, rank)
    return seen


def compiled_for_another(rank: int) -> list[dict[str, Any]]:
    """Two models of one structure share compiled code."""
    seen = []
    for seed in (rank, 2 + rank):
        model = build(seed)
        optimizer = adamw(model)
        prepare(model, optimizer)
        ddp = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
        seen.append(train(ddp, optimizer, rank, steps=3))
    return seen


def copied(rank: int, *, by: str) -> list[dict[str, Any]]:
    model = build()
    optimizer = adamw(model)
    prepare(model, optimizer)
    ddp = DistributedDataParallel(model)
    train(ddp, optimizer, rank, steps=3)
    if by == "deepcopy":
        other, its = copy.deepcopy((ddp, optimizer))
    else:
        file = io.BytesIO()
        torch.save((ddp, optimizer), file)
        file.seek(0)
        other, its = torch.load(file, weights_only=False)
    seen = [train(ddp, optimizer, rank, first=3), train(other, its, rank, first=3)]
    seen.append({"dtypes": [str(one.grad.dtype) for one in other.parameters()]})
    return seen


CHECKS = [
    Check("compiled model", compiled, around="model"),
    Check("compiled ddp", compiled, around="ddp"),
    Check("compiled model warm", compiled, around="model", warm=True),
    Check("compiled ddp warm", compiled, around="ddp", warm=True),
    compiled_for_another,
    Check("copied deepcopy", copied, by="deepcopy"),
    Check("copied save", copied, by="save"),
]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run(__name__)


@pytest.mark.parametrize("name", ["model", "ddp", "model warm", "ddp warm"])
def test_compiled_code_trains_as_eager_code(ranks: Ranks, name: str) -> None:
    results = ranks[f"compiled {name}"]
    for result in results:
        assert_equal(result["compiled"], result["eager"])  # aot_eager runs the same kernels
    assert_same_masters([result["compiled"] for result in results])


def test_a_second_model_is_set_up_although_its_code_is_compiled_already(ranks: Ranks) -> None:
    first, second = ranks["compiled_for_another"]
    for mine, theirs in zip(first, second, strict=True):
        assert_same_masters([mine, theirs])


@pytest.mark.parametrize("by", ["deepcopy", "save"])
def test_a_copy_trains_as_the_original(ranks: Ranks, by: str) -> None:
    for original, other, gradients in ranks[f"copied {by}"]:
        assert_equal(other, original)
        assert set(gradients["dtypes"]) == {"torch.float32"}
    assert_same_masters([result[1] for result in ranks[f"copied {by}"]])
