"""Models that go to a lower precision together, since they have parameters or an optimizer in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mezzo.apex.amp.model_values import FLOATS, buffers_of, parameters_of
from mezzo.apex.amp.properties import Properties
from mezzo.errors import PreparationError
from mezzo.torch.masters.params import master_of
from mezzo.torch.masters.preparation import Preparation, mark, preparation_of, watch_forward
from mezzo.torch.masters.prepare import prepare
from mezzo.torch.masters.prepare_checks import check_arithmetic
from mezzo.torch.masters.settings import Settings
from mezzo.torch.masters.unprepare import unprepare

__all__ = ["Group", "groups_of"]


@dataclass(eq=False)
class Group:
    """Models that have parameters or optimizers in common, which are prepared together.

    Attributes:
        ids: The identities of their parameters and buffers.
        models: The models.
        optimizers: Their optimizers.
        whole: What is prepared: the model, or all of them in a list; None if there is nothing to cast.
    """

    ids: set[int]
    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    whole: nn.Module | None = None

    def to_low(self, dtype: torch.dtype, properties: Properties) -> list[str]:
        """Store the models low."""
        tensors = [*parameters_of(self.models), *(one for _, _, one in buffers_of(self.models))]
        if not any(one.dtype in FLOATS for one in tensors):
            return []
        whole = self.models[0] if len(self.models) == 1 else nn.ModuleList(self.models)
        kept = [one for one in whole.modules() if isinstance(one, _BatchNorm) and properties.keep_batchnorm_fp32]
        held = any(one.is_floating_point() for norm in kept for one in (*norm.parameters(), *norm.buffers()))
        masters = bool(properties.master_weights)
        unsafe = [] if masters else self._unsafe(dtype, {id(one) for norm in kept for one in norm.parameters()})
        prepare(
            whole,
            list(self.optimizers),
            dtype=dtype,
            low="**",
            keep=_BatchNorm if held else (),
            buffers=True,
            masters=masters,
            rounding="stochastic" if unsafe else "nearest",
        )
        self.whole = whole
        return unsafe

    def _unsafe(self, dtype: torch.dtype, kept: set[int]) -> list[str]:
        """Say which optimizers cannot compute on low weights themselves."""
        stored = [one for one in parameters_of(self.models) if id(one) not in kept]
        said = []
        for optimizer in self.optimizers:
            try:
                check_arithmetic(stored, [optimizer], Settings(dtype, masters=False))
            except PreparationError:
                said.append(
                    f"{type(optimizer).__name__} cannot compute on weights in {dtype} as it is set: its steps are computed "
                    "in float32, and rounded stochastically. master_weights=True would keep what rounding loses."
                )
        return said

    def undo(self) -> None:
        """Take the models back to float32; their values are not those of before where there were no masters."""
        if self.whole is not None:
            unprepare(self.whole, self.optimizers)

    def mark_each(self) -> None:
        """Where several models were prepared as a list, give each what the list was given."""
        record = None if self.whole is None else preparation_of(self.whole)
        if self.whole is None or record is None or len(self.models) == 1:
            return
        places = [name.rpartition(".") for name in record.buffers]
        low = {(id(self.whole.get_submodule(path)), name) for path, _, name in places}
        for number, model in enumerate(self.models):
            mark(model, _record_of(model, record, f"{number}.", low), [])
            if record.mastered:
                watch_forward(model)


def groups_of(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> list[Group]:
    """Sort models and optimizers into groups that have nothing in common.

    Args:
        models: The models, each once.
        optimizers: The optimizers.

    Returns:
        The groups; each model and each optimizer is in one.
    """
    groups: list[Group] = []
    members = [Group({id(one) for one in _tensors(model)}, [model], []) for model in models]
    members += [
        Group({id(one) for each in optimizer.param_groups for one in each["params"]}, [], [optimizer])
        for optimizer in optimizers
    ]
    for member in members:
        near = [group for group in groups if group.ids & member.ids]
        groups = [group for group in groups if group not in near]
        joined = [*near, member]
        groups.append(
            Group(
                set().union(*(one.ids for one in joined)),
                [model for one in joined for model in one.models],
                [optimizer for one in joined for optimizer in one.optimizers],
            )
        )
    return groups


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _record_of(model: nn.Module, of_all: Preparation, start: str, low: set[tuple[int, str]]) -> Preparation:
    """Give the record of one model of several.

    Args:
        model: The model.
        of_all: The record of all.
        start: How its names begin there.
        low: The buffers that are stored low, by module and name.
    """

    def own(named: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(start): one for name, one in named.items() if name.startswith(start)}

    buffers = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers
        if (id(module), name) in low
    ]
    return replace(
        of_all,
        stored=own(of_all.stored),
        kept=own(of_all.kept),
        dtypes=own(of_all.dtypes),
        buffers=tuple(buffers),
        mastered=tuple(name for name, one in model.named_parameters() if master_of(one) is not None),
    )
