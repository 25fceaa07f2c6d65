"""Where casting fails, models, optimizers and hooks are as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import AmpError, PreparationError

from .cast_nets import WIDE, adam, initialize, mlp


def _prepared() -> nn.Module:
    model = mlp()
    initialize(model)
    return model


def _scripted() -> nn.Module:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))

    return Around()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (_prepared, AmpError, r"Sequential was cast before.*in one call of amp.initialize, or undo.*unprepare"),
        (_scripted, AmpError, r"ScriptModule or has one inside.*before torch.jit.script, or use opt_level='O1'"),
        (lambda: nn.LazyLinear(2), AmpError, r"The parameter 'weight' of .*Linear has no shape.*Run one forward"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), PreparationError, "before it is wrapped"),
    ],
)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_models_that_cannot_be_cast_leave_all_as_it_was(
    make: Callable[[], nn.Module], error: Any, text: str, level: str
) -> None:
    good, bad = mlp().double(), make()
    optimizer = adam(good)
    good(torch.rand(1, 4, dtype=WIDE)).sum().backward()
    optimizer.step()
    _leaves_all_as_it_was([good, bad], [optimizer], level, error, text)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_an_optimizer_that_cannot_be_prepared_leaves_all_as_it_was(level: str) -> None:
    class NoInit(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            self.param_groups, self.state = [{"params": list(params), "lr": 0.1, "eps": 1e-8}], {}
            self.defaults = {}

    models = [mlp(1).double(), mlp(2)]
    optimizers = [adam(models[0]), NoInit(models[1].parameters())]
    models[0](torch.rand(1, 4, dtype=WIDE)).sum().backward()
    optimizers[0].step()
    _leaves_all_as_it_was(models, optimizers, level, PreparationError, "NoInit does not call")


def _leaves_all_as_it_was(models: Any, optimizers: Any, level: str, error: Any, text: str) -> None:
    def look() -> Any:
        tensors = [
            (
                id(one),
                one.dtype,
                None if one.grad is None else (id(one.grad), one.grad.clone()),
                None if _lazy(one) else one.detach().clone(),
            )
            for model in models
            for one in (*model.parameters(), *model.buffers())
        ]
        hooks = [
            [
                len(each)
                for each in (
                    one._forward_pre_hooks,
                    one._forward_hooks,
                    one._state_dict_hooks,
                    one._load_state_dict_pre_hooks,
                )
            ]
            for model in models
            for one in model.modules()
        ]
        held = [[id(one) for group in each.param_groups for one in group["params"]] for each in optimizers]
        state = [
            (id(key), name, value.dtype, value.clone())
            for each in optimizers
            for key, entry in each.state.items()
            for name, value in entry.items()
        ]
        own = [sorted(vars(each)) for each in optimizers]
        return tensors, hooks, held, state, own

    before = look()
    with pytest.raises(error, match=text):
        initialize(models, optimizers, level)
    for one, old in zip(_flat(look()), _flat(before), strict=True):
        assert torch.equal(one, old) if isinstance(one, Tensor) else one == old
    models[0].zero_grad()
    models[0](torch.rand(1, 4, dtype=WIDE)).sum().backward()
    optimizers[0].step()


def _lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.parameter.UninitializedTensorMixin)


def _flat(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in _flat(each)] if isinstance(value, list | tuple) else [value]
