"""Copies, pickles and replicas of a cast model have its casts, and weights of their own."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.apex.amp.inputs import CastInputs, CastOutputs
from mezzo.torch.masters.params import masters_in

from .cast_nets import FULL, HALF, LOWS, WIDE, adam, initialize, mlp, sgd, train_step

LEVELS = ["O0", "O2", "O3"]
X = torch.rand(3, 4, dtype=WIDE)


@pytest.mark.parametrize("dtype", LOWS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_with_its_own_weights(duplicate: Any, level: str, dtype: torch.dtype) -> None:
    model = mlp()
    initialize(model, sgd(model), level, dtype=dtype)
    twin = duplicate(model)
    expected = model(X)
    assert torch.equal(twin(X), expected)
    with torch.no_grad():
        for one in twin.parameters():
            one.zero_()
    assert not bool(twin(X).any())
    assert torch.equal(model(X), expected)
    assert twin(X).dtype is FULL
    assert twin[0].weight.dtype is model[0].weight.dtype


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_model_and_optimizer_trains_as_they_do(duplicate: Any, level: str) -> None:
    model = mlp()
    optimizer = adam(model, eps=1e-4)
    initialize(model, optimizer, level)
    train_step(model, optimizer)
    twin, its_own = duplicate((model, optimizer))
    for step in range(3):
        assert torch.equal(train_step(twin, its_own, step), train_step(model, optimizer, step))
    assert len(masters_in(its_own)) == len(masters_in(optimizer)) == (4 if level == "O2" else 0)


_SAVE = """
import sys, torch
from mezzo.apex.amp.models import cast_models
from mezzo.apex.amp.properties import resolve

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cast_models([model], [optimizer], resolve(sys.argv[2], {}, None)[1], None)
x = torch.rand(3, 4, dtype=torch.float64)
torch.save((model, x, model(x)), sys.argv[1])
"""
_LOAD = """
import sys, torch

model, x, expected = torch.load(sys.argv[1], weights_only=False)
register = {"O2": model.register_forward_pre_hook, "O3": model.register_forward_hook}[sys.argv[2]]
seen = []
for _ in range(50):
    # PyTorch numbers hooks from 0 in a new process, as it did ours in the other one.
    register(lambda module, args, *out: seen.append((*args, *out)[-1].dtype))
out = model(x)
assert torch.equal(out, expected), (out, expected)
assert out.dtype is torch.float32
assert all(one.dtype is torch.float32 for one in model.state_dict().values())
assert all(one.dtype is torch.float32 for one in model[0].state_dict().values())
assert len(seen) == 50
print(model[0].weight.dtype)
"""


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_model_out_of_a_file_has_its_casts_in_another_process(level: str, tmp_path: Path) -> None:
    for script in (_SAVE, _LOAD):
        call = [sys.executable, "-W", "error", "-c", script, str(tmp_path / "model.pt"), level]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.float16"


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, image: Tensor, *, scale: float = 1.0) -> Tensor:
        """Scale."""
        out: Tensor = self.layer(image) * scale
        return out


@pytest.mark.parametrize("level", [*LEVELS, "O1"])
def test_the_forward_of_a_model_stays_its_own(level: str) -> None:
    model = Named()
    initialize(model, sgd(model), level, HALF)
    assert str(inspect.signature(model.forward)) == "(image: 'Tensor', *, scale: 'float' = 1.0) -> 'Tensor'"
    assert "forward" not in vars(model)
    assert model.forward.__doc__ == "Scale."


@pytest.mark.parametrize("level", LEVELS)
def test_a_replica_computes_with_its_own_weights(level: str) -> None:
    """As ``nn.DataParallel`` makes them: shallow copies, whose parameters are put there as plain tensors."""
    model = mlp()
    initialize(model, sgd(model), level)
    replica = model._replicate_for_data_parallel()
    for name, part in model.named_children():
        inner = part._replicate_for_data_parallel()
        replica._modules[name] = inner
        for each, one in part._parameters.items():
            assert one is not None
            setattr(inner, each, one.detach() * 2)
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        for one in doubled.parameters():
            one.mul_(2)
    assert torch.equal(replica(X), doubled(X))
    assert not torch.equal(replica(X), model(X))
    assert replica(X).dtype is FULL


def test_data_parallel_on_a_cpu_casts_too() -> None:
    model = mlp()
    optimizer = sgd(model)
    initialize(model, optimizer)
    wrapped = nn.DataParallel(model)
    if torch.cuda.is_available():
        wrapped = wrapped.cuda()
    out = wrapped(X)
    assert out.dtype is FULL
    out.sum().backward()
    assert model[0].weight.grad is not None


def test_casts_of_a_copy_can_be_changed_alone() -> None:
    model = mlp()
    initialize(model, level="O0")
    twin = copy.deepcopy(model)
    initialize(twin, level="O0", outputs=HALF)
    assert list(model._forward_hooks.values()) == [CastOutputs(FULL)]
    assert list(twin._forward_hooks.values()) == [CastOutputs(HALF)]
    assert list(twin._forward_pre_hooks.values()) == [CastInputs(FULL)]
