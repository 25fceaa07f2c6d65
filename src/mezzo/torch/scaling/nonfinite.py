"""Which parameters had an Inf or a NaN in their gradients: counted on the device, named and read when somebody asks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .gradients import values_of

__all__ = ["Counts", "NonFinite", "Overflow", "count", "parameter_names", "reference_to"]

_CHANGED = (
    "the gradients were changed between unscale_ and step; clip with the scaler's clip_grad_norm_, which leaves gradients "
    "that are not finite as they are"
)


@dataclass(frozen=True)
class NonFinite:
    """A parameter whose gradient was not finite.

    Attributes:
        name: The parameter's name.
        nan: How many elements of the gradient were NaN.
        inf: How many were Inf or -Inf.
        numel: How many there are; of a DTensor, on this rank.
        dtype: The gradient's dtype, such as ``"float16"``.

    Example:
        >>> from mezzo.torch import NonFinite
        >>> print(NonFinite("head.weight", nan=3, inf=1, numel=64, dtype="float32"))
        head.weight: 3 NaN, 1 Inf of 64 (float32)
    """

    name: str
    nan: int
    inf: int
    numel: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}: {self.nan} NaN, {self.inf} Inf of {self.numel} ({self.dtype})"


class Counts:
    """How many NaN and Inf each gradient had when it was looked at; on the devices until it is read.

    Args:
        parameters: The ids of those that had gradients.
        counted: For each, its device's 1-D int64 tensor of two: NaN, Inf.
        sizes: For each gradient its number of elements and its dtype.
    """

    __slots__ = ("counted", "parameters", "sizes")

    def __init__(self, parameters: list[int], counted: list[Tensor], sizes: list[tuple[int, torch.dtype]]) -> None:
        self.parameters = parameters
        self.counted = counted
        self.sizes = sizes

    def flags(self, device: torch.device) -> Tensor:
        """Say, on a device and without a host read, whether there was any NaN and any Inf: float32, two elements."""
        if not self.counted:
            return torch.zeros(2, device=device)
        there = [pair.to(device, non_blocking=True) for pair in self.counted]
        return torch.stack(there).amax(0).clamp(max=1).float()

    def read(self, names: Mapping[int, str]) -> tuple[NonFinite, ...]:
        """Read the counts, and name the parameters that have any.

        Args:
            names: From the id of a parameter to its name.
        """
        by_device: dict[torch.device, list[int]] = {}
        for index, pair in enumerate(self.counted):
            by_device.setdefault(pair.device, []).append(index)
        read: dict[int, tuple[int, int]] = {}
        for indices in by_device.values():
            pairs = torch.stack([self.counted[index] for index in indices]).tolist()
            read.update({index: (pair[0], pair[1]) for index, pair in zip(indices, pairs, strict=True)})
        found = []
        for index, parameter in enumerate(self.parameters):
            nan, inf = read[index]
            if nan or inf:
                numel, dtype = self.sizes[index]
                name = names.get(parameter, "a parameter that has left the optimizer")
                found.append(NonFinite(name, nan, inf, numel, str(dtype).removeprefix("torch.")))
        return tuple(found)


class Overflow:
    """A step that was skipped, as a callback gets it.

    Numbers are read from the device when they are asked for. It keeps the optimizer and its parameters alive no longer than
    anybody else does.

    Attributes:
        optimizer: The optimizer that did not step.
        skipped_in_a_row: How many steps of it were skipped in a row, this one included.
        scale: The scale of the loss at that step.
        parameters: The parameters whose gradients were not finite, in the optimizer's order.
        known: Whether they are known.
        describe: Names them in one line, or says why they are not known.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scale: Tensor,
        skipped_in_a_row: int,
        counts: Counts | None,
        given_names: Mapping[int, str],
        why_unknown: str,
        *,
        changed: bool,
    ) -> None:
        self._optimizer: Any = reference_to(optimizer)
        self.skipped_in_a_row = skipped_in_a_row
        self._scale = scale
        self._counts = counts
        self._given_names = given_names
        self._why_unknown = why_unknown or _CHANGED
        self._changed = changed
        self._parameters: tuple[NonFinite, ...] | None = None

    @property
    def optimizer(self) -> Any:
        """The optimizer that did not step, or None if it is gone."""
        return self._optimizer()

    @property
    def scale(self) -> float:
        """The scale of the loss at that step."""
        return float(self._scale)

    @property
    def known(self) -> bool:
        """False where gradients had been made NaN altogether, or were gone, before anybody knew of them."""
        return self._counts is not None and not (self._changed and not self.parameters)

    @property
    def parameters(self) -> tuple[NonFinite, ...]:
        """The parameters whose gradients were not finite, in the optimizer's order; empty if not `known`."""
        if self._parameters is None:
            if self._counts is None:
                return ()
            optimizer = self._optimizer()
            names = {} if optimizer is None else parameter_names(optimizer, self._counts.parameters, self._given_names)
            found = self._counts.read(names)
            all_nan = len(found) == len(self._counts.parameters) and all(one.nan == one.numel for one in found)
            # What was changed afterwards, by clipping say, still tells something unless there is nothing left but NaN.
            self._parameters = () if self._changed and all_nan else found
        return self._parameters

    def describe(self, most: int = 5) -> str:
        """Name the parameters in one line.

        Args:
            most: How many to name; of the others the number is said.

        Returns:
            Such as ``"weight: 3 NaN, 0 Inf of 64 (float32); bias: ..."``.
        """
        if not self.known:
            return f"(unknown: {self._why_unknown})"
        found = self.parameters
        if not found:
            return "none of this rank's or this optimizer's"
        rest = f"; and {len(found) - most} more" if len(found) > most else ""
        return "; ".join(str(one) for one in found[:most]) + rest

    def __repr__(self) -> str:
        return f"<Overflow: {self.skipped_in_a_row} skipped in a row, at scale {self.scale}: {self.describe()}>"


def reference_to(optimizer: torch.optim.Optimizer) -> Any:
    """Give a function that gives the optimizer, or None once it is gone; if it can be, one that does not keep it alive."""
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer  # no weak references to it


@torch.no_grad()
def count(parameters: Iterable[Tensor]) -> Counts:
    """Count NaN and Inf in the gradients of parameters, on their devices and without a host read."""
    having, counted, sizes = [], [], []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        values = values_of(parameter.grad)
        # Types of eight bits know no test for finiteness of their own.
        looked_at = values.float() if values.dtype.itemsize == 1 else values
        having.append(id(parameter))
        counted.append(torch.stack([looked_at.isnan().sum(), looked_at.isinf().sum()]))
        sizes.append((values.numel(), parameter.grad.dtype))
    return Counts(having, counted, sizes)


def parameter_names(
    optimizer: torch.optim.Optimizer, parameters: Iterable[int], given: Mapping[int, str]
) -> dict[int, str]:
    """Name parameters: as they were given, else as the optimizer or a living module knows them, else by position.

    Args:
        optimizer: The optimizer that has them.
        parameters: The ids of those to name.
        given: From the ids of parameters to names that the user gave.

    Returns:
        From the id of each parameter to its name.
    """
    places: dict[int, str] = {}
    listed: dict[int, str] = {}
    # A master goes by the name of the model's parameter (`mezzo.torch.prepare`).
    known_as: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        places.update({id(one): f"param_groups[{index}]['params'][{at}]" for at, one in enumerate(group["params"])})
        known_as.update({id(one): id(getattr(one, "model_param", one)) for one in group["params"]})
        # There if the optimizer was made from model.named_parameters().
        listed.update({id(one): name for one, name in zip(group["params"], group.get("param_names", ()), strict=False)})
    known = {**listed, **{key: given[other] for key, other in known_as.items() if other in given}, **given}
    nameless = {known_as.get(key, key): key for key in set(parameters) - known.keys()}
    found = _names_in_modules(nameless) if nameless else {}
    return {**places, **{nameless[other]: name for other, name in found.items()}, **known}


def _names_in_modules(wanted: Container[int]) -> dict[int, str]:
    """Look for parameters, by their ids, in the modules that are alive and in no other module.

    It takes milliseconds, more in a large program, and happens only when somebody asks for names that nobody gave.
    """
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
    found: dict[int, str] = {}
    for module in modules:
        # One whose __init__ has not come to super().__init__() has no parameters yet.
        if id(module) not in inner and "_parameters" in module.__dict__:
            found.update({id(one): name for name, one in module.named_parameters() if id(one) in wanted})
    return found
