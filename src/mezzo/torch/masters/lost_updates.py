"""`count_lost_updates`: how many updates of weights come to nothing because the weight is stored in low precision.

An update of less than half a step of the dtype that a weight is stored in changes nothing, in this iteration and in all
that follow: bfloat16 has steps of 1/256 to 1/128 of the weight, and learning rates are smaller than that. Whether it happens
in a training at hand can be counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo.torch.agreement import local
from mezzo.torch.eager import runs_eagerly

from .hooks import watch_steps
from .params import Master

__all__ = ["LostUpdates", "UpdateCounts", "count_lost_updates"]


class UpdateCounts(NamedTuple):
    """What came of the updates of one parameter's elements, summed over steps.

    Attributes:
        updates: Elements with a gradient that is not 0.
        lost: Of those, elements whose stored value is after the step what it was before.
        waiting: Elements whose stored value changed, but not enough for the model's low-precision weight to change.
    """

    updates: int
    lost: int
    waiting: int


class _Values(NamedTuple):
    """The tensors that hold a parameter, or copies of them: the model's weight and, if there is one, what is beside it."""

    weight: Tensor
    beside: Tensor | None
    is_sum: bool
    """Whether the stored value is the sum of the two; else it is what is beside, or the weight alone."""

    def copied(self) -> _Values:
        return _Values(self.weight.clone(), None if self.beside is None else self.beside.clone(), self.is_sum)

    def stored(self) -> Tensor:
        if self.beside is None:
            return self.weight
        return self.weight.to(torch.float32) + self.beside if self.is_sum else self.beside


class LostUpdates:
    """The counts of `count_lost_updates`, as far as they have got; those of this rank's shards in a distributed run.

    Every attribute reads from the device when it is asked for, and waits for it; counting never does. To be read by any
    thread, not while another one steps.

    Attributes:
        by_parameter: A parameter's name, where its group in the optimizer has ``param_names``, or else its index over all
            groups, to its `UpdateCounts`. Parameters that never had a gradient are not in it.
        updates: Over all parameters.
        lost: Over all parameters.
        waiting: Over all parameters.
        fraction: The share of the updates that were lost; 0.0 if there were none.
        steps: How many steps were counted.
    """

    def __init__(self) -> None:
        self._counts: dict[str | int, Tensor] = {}
        self._steps: dict[torch.device, Tensor] = {}
        self._whole_steps = 0

    @property
    def by_parameter(self) -> Mapping[str | int, UpdateCounts]:
        """Give the counts of each parameter that had a gradient."""
        return MappingProxyType({name: UpdateCounts(*counts.tolist()) for name, counts in self._counts.items()})

    @property
    def updates(self) -> int:
        """Give how many there were, over all parameters."""
        return self._total().updates

    @property
    def lost(self) -> int:
        """Give how many of them were lost."""
        return self._total().lost

    @property
    def waiting(self) -> int:
        """Give how many changed a master and not yet the weight."""
        return self._total().waiting

    @property
    def fraction(self) -> float:
        """Give the share that was lost."""
        total = self._total()
        return total.lost / total.updates if total.updates else 0.0

    @property
    def steps(self) -> int:
        """Give how many steps were counted."""
        return self._whole_steps + sum(int(steps.item()) for steps in self._steps.values())

    def __repr__(self) -> str:
        total = self._total()
        numbers = ", ".join(f"{name}={number}" for name, number in total._asdict().items())
        return f"LostUpdates({numbers}, steps={self.steps})"

    def _total(self) -> UpdateCounts:
        return UpdateCounts(*map(sum, zip((0, 0, 0), *self.by_parameter.values(), strict=True)))

    def _add_step(self, found: Tensor | None) -> None:
        if found is None:
            self._whole_steps += 1
            return
        made = (found <= 0).sum()
        self._steps[made.device] = self._steps.get(made.device, 0) + made

    def _add(self, name: str | int, counts: Tensor) -> None:
        self._counts[name] = self._counts[name] + counts if name in self._counts else counts


def count_lost_updates(optimizer: torch.optim.Optimizer) -> AbstractContextManager[LostUpdates]:
    """Count, over the steps of an optimizer, the updates that change nothing and those that only a master sees.

    What is looked at is the stored value: the float32 master where the optimizer holds one, weight and compensation
    together where these stand for it, and else the parameter itself, of whatever dtype; the optimizer need not be one that
    `mezzo.torch.prepare` has seen. An update counts as lost if the gradient is not 0 and the stored value stays what it was,
    whatever the reason: rounding, or a learning rate of 0 as well. A gradient is looked at as it is after the step.

    Steps that a gradient scaler leaves out count nothing, nor do fused ones that find its flag for non-finite gradients set.
    While a step runs, a copy is held of what it may change. What is counted stays on the device. Nothing is changed and no
    warning given. Not to be entered or left while another thread steps any optimizer.

    Args:
        optimizer: Any optimizer of PyTorch's kind.

    Returns:
        A context manager that gives the `LostUpdates`, which can be read within the block and after it.

    Raises:
        TypeError: ``optimizer`` is none.

    Example:
        >>> import torch
        >>> from mezzo.torch import count_lost_updates
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 0.001], dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([weight], lr=1e-3)
        >>> with count_lost_updates(optimizer) as counted:
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> counted
        LostUpdates(updates=2, lost=1, waiting=0, steps=1)
        >>> counted.fraction
        0.5
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        msg = f"count_lost_updates takes a torch.optim.Optimizer, got {type(optimizer).__name__}."
        raise TypeError(msg)
    return _counting(optimizer)


@contextmanager
def _counting(optimizer: torch.optim.Optimizer) -> Iterator[LostUpdates]:
    counter = _Counter(optimizer)
    # A prepared optimizer's weights are rounded in the global hook after a step, which comes after the hooks of a single
    # optimizer; so this one is global too, and registered after that one. Before a step the global one comes first.
    watch_steps()
    before = optimizer.register_step_pre_hook(counter.before_step)
    after = register_optimizer_step_post_hook(counter.after_step)
    try:
        yield counter.result
    finally:
        before.remove()
        after.remove()


class _Counter:
    """Compares the values of an optimizer's parameters before and after a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.result = LostUpdates()
        self._optimizer = optimizer
        self._before: dict[str | int, _Values] | None = None

    @runs_eagerly
    def before_step(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        with torch.no_grad():
            self._before = {name: _values_of(one).copied() for name, one in _parameters(optimizer)}

    @runs_eagerly
    def after_step(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        # A step that calls that of its base class ends twice.
        if optimizer is not self._optimizer or self._before is None:
            return
        before, self._before = self._before, None
        found = getattr(optimizer, "found_inf", None)
        with torch.no_grad():
            for name, one in _parameters(optimizer):
                if name in before and one.grad is not None:
                    counts = _compare(before[name], _values_of(one), local(one.grad))
                    self.result._add(name, counts if found is None else counts * (found <= 0).to(counts.device))
            self.result._add_step(found)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str | int, Tensor]]:
    index = 0
    for group in optimizer.param_groups:
        names = group.get("param_names")
        for place, one in enumerate(group["params"]):
            yield (index if names is None else names[place]), one
            index += 1


def _values_of(parameter: Tensor) -> _Values:
    if not isinstance(parameter, Master):
        return _Values(local(parameter), None, False)
    weight = local(parameter.model_param)
    if parameter.owner.settings.keeps_masters:
        return _Values(weight, local(parameter.values()), False)
    beside = parameter.compensation
    return _Values(weight, None if beside is None else local(beside), True)


def _compare(before: _Values, after: _Values, gradient: Tensor) -> Tensor:
    """Count as `UpdateCounts` does, on the device."""
    updated = (gradient if gradient.layout is torch.strided else gradient.to_dense()) != 0
    changed = after.stored() != before.stored()
    waiting = changed & (after.weight == before.weight)
    return torch.stack([updated.sum(), (updated & ~changed).sum(), waiting.sum()])
