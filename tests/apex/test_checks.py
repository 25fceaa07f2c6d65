"""Which models and optimizers are taken, and what is said about others."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mezzo.apex.amp import checks
from mezzo.errors import AmpError, AmpTypeError
from tests.process_groups import end_process_group


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Larc:
    """Wraps an optimizer, as Apex's LARC does, and is none."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.optim.step()


class FP16_Optimizer(Larc):  # noqa: N801 - Apex's name
    pass


def test_one_model_and_one_optimizer_become_lists() -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    assert checks.as_list_of_models(model) == ([model], False)
    assert checks.as_list_of_optimizers(optimizer) == ([optimizer], False)
    assert checks.as_list_of_optimizers(None) == ([], False)


def test_lists_stay_the_same_objects() -> None:
    models = [nn.Linear(2, 2), nn.ReLU()]
    optimizers = [sgd(models[0])]
    assert checks.as_list_of_models(models)[0] is models
    assert checks.as_list_of_optimizers(optimizers)[0] is optimizers
    assert checks.as_list_of_models(models)[1] is checks.as_list_of_optimizers(optimizers)[1] is True
    assert checks.as_list_of_optimizers([]) == ([], True)


def test_what_wraps_an_optimizer_is_one_optimizer() -> None:
    wrapped = Larc(sgd(nn.Linear(2, 2)))
    assert checks.as_list_of_optimizers(wrapped) == ([wrapped], False)
    assert checks.as_list_of_optimizers([wrapped])[1] is True
    assert checks.inner_optimizer(wrapped) is wrapped.optim
    wrapped.optim.optim = sgd(nn.Linear(2, 2))  # type: ignore[attr-defined]
    assert checks.inner_optimizer(wrapped.optim) is wrapped.optim
    bare = types.SimpleNamespace(param_groups=[], step=print)
    assert checks.inner_optimizer(bare) is bare


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((nn.ReLU(),), r"a list of models, got a tuple\. Write list\(models\)"),
        (None, "or a list of models, got a NoneType"),
        (nn.ReLU, "got a class ReLU"),
        ([nn.ReLU(), 3], "in the list there is a int"),
        ([None, nn.ReLU()], "in the list there is a NoneType"),
        (iter([nn.ReLU()]), "got a list_iterator"),
    ],
)
def test_other_kinds_of_models_are_refused(given: Any, text: str) -> None:
    with pytest.raises(AmpTypeError, match=text) as caught:
        checks.as_list_of_models(given)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((sgd(nn.Linear(2, 2)),), r"a list of optimizers, got a tuple\. Write list\(optimizers\)"),
        (torch.optim.SGD, "got a class SGD"),
        ([sgd(nn.Linear(2, 2)), None], "in the list there is a NoneType"),
        ({"a": 1}, "got a dict"),
    ],
)
def test_other_kinds_of_optimizers_are_refused(given: Any, text: str) -> None:
    with pytest.raises(AmpTypeError, match=text):
        checks.as_list_of_optimizers(given)


def test_legacy_optimizers_are_refused() -> None:
    with pytest.raises(AmpError, match=r"Give amp.initialize the optimizer that is inside"):
        checks.as_list_of_optimizers(FP16_Optimizer(sgd(nn.Linear(2, 2))))


def test_models_on_a_cpu_in_float32_and_float64_are_welcome() -> None:
    checks.check_models([nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.ReLU()], False)
    with torch.device("meta"):
        checks.check_models([nn.Linear(2, 2)], False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_lower_precision_are_refused_by_the_name_of_a_parameter(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype))
    text = rf"The parameter '1.weight' of Sequential is {dtype}.*do not call .half\(\).*Load the float32 weights"
    with pytest.raises(AmpError, match=text):
        checks.check_models([nn.ReLU(), model], False)
    checks.check_models([nn.ReLU(), model], True)


def test_so_are_those_with_a_low_buffer() -> None:
    model = nn.BatchNorm1d(2)
    model.running_mean = model.running_mean.half()  # type: ignore[union-attr]
    with pytest.raises(AmpError, match=r"The buffer 'running_mean' of BatchNorm1d is torch.float16"):
        checks.check_models([model], False)


def test_a_compiled_model_is_looked_into() -> None:
    compiled: Any = torch.compile(nn.Linear(2, 2).half(), backend="eager")
    with pytest.raises(AmpError, match="The parameter 'weight' of Linear"):
        checks.check_models([compiled], False)


class FullyShardedDataParallel(nn.Module):
    """Has the name of FSDP, which is slow to import and needs processes."""


@pytest.mark.parametrize("model", [nn.DataParallel(nn.Linear(2, 2)), FullyShardedDataParallel()])
def test_wrapped_models_are_refused(model: nn.Module) -> None:
    kind = type(model).__name__
    with pytest.raises(AmpError, match=rf"wrapped in {kind} already.*then wrap what it returns.*{kind}\(model\)"):
        checks.check_models([model], True)


def test_ddp_and_its_subclasses_are_refused(tmp_path: Path) -> None:
    class Ours(nn.parallel.DistributedDataParallel):
        pass

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        for wrapper in (nn.parallel.DistributedDataParallel, Ours):
            with pytest.raises(AmpError, match=f"wrapped in {wrapper.__name__} already"):
                checks.check_models([wrapper(nn.Linear(2, 2))], False)
    finally:
        end_process_group()


def test_an_optimizer_that_is_there_twice_is_refused() -> None:
    optimizer = sgd(nn.Linear(2, 2))
    checks.check_optimizers([optimizer, sgd(nn.Linear(2, 2))])
    for second in (optimizer, Larc(optimizer)):
        with pytest.raises(AmpError, match="SGD is in the list of optimizers twice"):
            checks.check_optimizers([optimizer, second])


@pytest.mark.parametrize("name", ["_amp_stash", "_prepare_amp_backward", "_amp_lazy_init"])
def test_an_optimizer_that_was_initialized_is_refused(name: str) -> None:
    optimizer = sgd(nn.Linear(2, 2))
    setattr(optimizer, name, None)
    for given in (optimizer, Larc(optimizer)):
        with pytest.raises(AmpError, match=f"SGD was initialized before .*{name}.*once: give all models"):
            checks.check_optimizers([given])
