"""A model with rules of `set_precision` stays what it is: copies, files, state, export."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.torch import clear_precision, set_precision

from .named_model import LOW, TOKENS, Model, output


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def copies(model: nn.Module) -> dict[str, nn.Module]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(file, weights_only=False),
    }


@pytest.mark.parametrize("rule", ["fp32", {"linear": "fp32"}], ids=str)
def test_copies_keep_the_rules_and_are_independent(model: Model, rule: Any) -> None:
    placed = set_precision(model, {"lm_head": rule})
    expected = output(model)
    for kind, twin in copies(model).items():
        assert torch.equal(output(twin), expected), kind
    twins = copies(model)
    placed.remove()
    assert output(model).dtype is LOW
    for kind, twin in twins.items():
        assert output(twin).dtype is torch.float32, kind
        clear_precision(twin)
        assert output(twin).dtype is LOW, kind
        assert not twin.lm_head._forward_hooks, kind
    set_precision(model, {"lm_head": rule})
    clear_precision(copy.deepcopy(model))
    assert output(model).dtype is torch.float32


def test_the_state_dict_and_the_forward_are_untouched(model: Model) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = set(vars(model.lm_head))
    set_precision(model, {"**": "fp32"})
    output(model)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert set(vars(model.lm_head)) == attributes
    fresh = Model()
    fresh.load_state_dict(after)
    assert torch.equal(fresh(TOKENS), model(TOKENS))


LOADING = """
import sys, torch
from torch import nn
from mezzo.torch import autocast
net = torch.load(sys.argv[1], weights_only=False)
for _ in range(50):  # as many hooks as it takes for a number to come again
    net[0].register_forward_pre_hook(lambda *_: None)
    net[0].register_forward_hook(lambda *_: None)
with autocast("cpu", dtype=torch.bfloat16):
    print(net(torch.ones(1, 4)).dtype)
"""


def test_hooks_added_to_a_loaded_model_do_not_take_the_place_of_its_own(tmp_path: Path) -> None:
    """PyTorch numbers hooks from 0 in each process, and a model brings its numbers along."""
    net = nn.Sequential(nn.Linear(4, 4))
    set_precision(net, {"0": "fp32"})
    torch.save(net, tmp_path / "net.pt")
    command = [sys.executable, "-W", "error", "-c", LOADING, str(tmp_path / "net.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("torch.float32\n", "")


def test_a_model_with_rules_is_exported_outside_of_regions() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    set_precision(net, {"0": "fp32"})
    x = torch.rand(2, 4)
    assert torch.equal(torch.export.export(net, (x,)).module()(x), net(x))
