"""Blocks under DDP's `no_sync`: seen if the model is compiled too, and forgotten when it is called in another way."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.apex import amp
from tests.torch.scaler_distributed.processes import Ranks, run

from .conftest import end_amp
from .nets import loss_of, net, sgd


def train(rank: int, model: nn.Module, ddp: Any, optimizer: Any, *, outside: bool) -> dict[str, Any]:
    """Three steps of two micro-batches, the first of each under `no_sync`; one of the first rank's overflows."""
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            silent = ddp.no_sync() if part == 0 else contextlib.nullcontext()
            with contextlib.ExitStack() as stack:
                stack.enter_context(silent)
                loss = loss_of(ddp, 10 * step + 2 * part + rank)
                if outside:
                    stack.close()
                if (step, part, rank) == (1, 0, 0):
                    loss = loss * torch.inf
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
        optimizer.step()
    return {
        "weights": torch.cat([one.detach().float().flatten() for one in model.parameters()]),
        "scale": amp._amp_state.loss_scalers[0].loss_scale(),
    }


def models_that_are_compiled(rank: int) -> dict[str, dict[str, Any]]:
    found = {}
    for level in ("O1", "O2"):
        for how in ("plain", "inside", "inside, called before", "around"):
            for outside in (False, True):
                torch.compiler.reset()
                for fold in range(2):  # the second one finds the graphs of the first
                    end_amp()
                    model = net()
                    optimizer = sgd(model)
                    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
                    called = torch.compile(model, backend="aot_eager") if how.startswith("inside") else model
                    if how.endswith("before"):
                        loss_of(called)
                    ddp: Any = DistributedDataParallel(called)
                    if how == "around":
                        ddp = torch.compile(ddp, backend="aot_eager")
                    found[f"{level}, {how}, {outside}, {fold}"] = train(rank, model, ddp, optimizer, outside=outside)
    end_amp()
    return found


def calls_in_other_ways(rank: int) -> dict[str, tuple[float, list[float]]]:
    """A `no_sync` pass is the last one of a DDP that nobody uses again."""
    found = {}
    for how in ("another DDP", "the model itself"):
        end_amp()
        model = net()
        optimizer = sgd(model)
        amp.initialize(model, optimizer, opt_level="O1", loss_scale=1024.0, verbosity=0)
        old = DistributedDataParallel(model)
        with old.no_sync(), amp.scale_loss(loss_of(old, rank), optimizer) as scaled:
            scaled.backward()
        assert optimizer._amp_stash.params_have_scaled_gradients
        optimizer.zero_grad()
        called = DistributedDataParallel(model) if how == "another DDP" else model
        with amp.scale_loss(loss_of(called, rank), optimizer) as scaled:
            scaled.backward()
        norm = float(nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e9))
        found[how] = (optimizer._amp_stash.factor, [norm])
    end_amp()
    return found


CHECKS = [models_that_are_compiled, calls_in_other_ways]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run(__name__)


@pytest.mark.slow
def test_ranks_take_one_decision_however_the_model_is_compiled(ranks: Ranks) -> None:
    first, second = ranks["models_that_are_compiled"]
    assert len(first) == 32
    for name, found in first.items():
        assert torch.equal(found["weights"], second[name]["weights"]), name
        assert found["scale"] == second[name]["scale"] == 32768.0, name


@pytest.mark.slow
def test_a_pass_that_nobody_goes_on_from_is_forgotten(ranks: Ranks) -> None:
    for found in ranks["calls_in_other_ways"]:
        for factor, (norm,) in found.values():
            assert factor == 1.0
            assert norm < 10.0
