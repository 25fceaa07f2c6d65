"""What low-precision parameters save: bytes before and after `mezzo.torch.prepare`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.errors import PreparationError

from .params import Master, master_of
from .preparation import preparation_of
from .prepare_checks import checked

__all__ = ["Bytes", "MemoryReport", "memory_report"]


@dataclass(frozen=True)
class Bytes:
    """Memory of one kind of training state each, in bytes.

    Attributes:
        parameters: Of the model.
        gradients: One per parameter that requires it, as a single backward pass leaves it; none without an optimizer.
        optimizer_state: Moments and alike, as they are now.
        masters: Float32 masters, or the compensation in their place.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    masters: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer_state + self.masters


@dataclass(frozen=True)
class MemoryReport:
    """What `memory_report` gives; its ``str`` is a table.

    Attributes:
        before: As the model would be without `mezzo.torch.prepare`.
        after: As it is.
        stored: Name of a parameter that is stored low to the reason.
        kept: The same of the others.
    """

    before: Bytes
    after: Bytes
    stored: Mapping[str, str]
    kept: Mapping[str, str]

    def __str__(self) -> str:
        names = ("parameters", "gradients", "optimizer_state", "masters", "total")
        rows = [("bytes", "before", "after")]
        rows += [(one.replace("_", " "), _shown(self.before, one), _shown(self.after, one)) for one in names]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)


def _shown(counted: Bytes, name: str) -> str:
    return f"{getattr(counted, name):,}"


def memory_report(model: nn.Module, optimizer: Any = None) -> MemoryReport:
    """Count the memory of a prepared model and its optimizer, and what it would be without.

    Args:
        model: A model that was prepared.
        optimizer: Its optimizer, or a list of them; call it after the first step, when its state is there.

    Returns:
        The report, in bytes. Of a sharded model, those of this rank.

    Raises:
        PreparationError: The model is not prepared, or what came is no optimizer.
        TypeError: ``model`` is no module.

    Example:
        >>> import mezzo.torch
        >>> model = mezzo.torch.prepare(nn.Linear(64, 64))
        >>> print(memory_report(model))
        bytes            before  after
        parameters       16,640  8,320
        gradients             0      0
        optimizer state       0      0
        masters               0      0
        total            16,640  8,320
    """
    model, optimizers = checked(model, optimizer, "memory_report")
    record = preparation_of(model)
    if record is None:
        msg = "The model is not prepared; call mezzo.torch.prepare(model, optimizer) first."
        raise PreparationError(msg)
    named = list(model.named_parameters())
    before = {id(one): _numel(one) * _item_before(name, one, record) for name, one in named}
    pairs = [pair for one in optimizers for pair in one.state.items()]
    state = sum(_bytes(each) for _, value in pairs for each in _tensors(value))
    # Without masters it has the dtype of the parameters.
    wide_state = sum(
        _numel(each) * _item_of_state(each, one, before) for one, value in pairs for each in _tensors(value)
    )
    held = [one for each in optimizers for group in each.param_groups for one in group["params"]]
    masters = {id(one): _of_master(one) for one in held if isinstance(one, Master)}
    trained = [one for _, one in named if one.requires_grad and (optimizers or record.with_optimizer)]
    low = {name for name, one in model.state_dict(keep_vars=True).items() if one.dtype is record.settings.dtype}
    return MemoryReport(
        Bytes(sum(before.values()), sum(before[id(one)] for one in trained), wide_state, 0),
        Bytes(
            sum(_bytes(one) for _, one in named),
            sum(_numel(one) * _gradient_dtype(one).itemsize for one in trained),
            state,
            sum(masters.values()),
        ),
        # Of modules that have been replaced since, nothing is stored low.
        {name: reason for name, reason in record.stored.items() if name in low},
        dict(record.kept),
    )


def _item_before(name: str, parameter: Tensor, record: Any) -> int:
    dtype = record.dtypes.get(name, torch.float32) if name in record.stored else parameter.dtype
    return int(dtype.itemsize)


def _item_of_state(state: Tensor, parameter: Any, before: Mapping[int, int]) -> int:
    follows = id(parameter) in before and state.is_floating_point() and state.dtype is parameter.dtype
    return before[id(parameter)] // max(1, _numel(parameter)) if follows and parameter.numel() else state.element_size()


def _gradient_dtype(parameter: Tensor) -> torch.dtype:
    master = master_of(parameter)
    if master is None:
        return parameter.dtype
    return torch.float32 if master.adds else master.owner.settings.grad_dtype or parameter.dtype


def _of_master(master: Master) -> int:
    lacking = 0 if master.compensation is None else _bytes(master.compensation)
    return lacking + (_bytes(master.values()) if master.owner.settings.keeps_masters else 0)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif not isinstance(value, str | bytes) and isinstance(value, Iterable):
        for each in value:
            yield from _tensors(each)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _numel(tensor: Tensor) -> int:
    return _local(tensor.detach()).numel()


def _bytes(tensor: Tensor) -> int:
    return _numel(tensor) * tensor.element_size()
