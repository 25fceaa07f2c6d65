"""What a `GradScaler` tells about the steps of its optimizers, and what its parameters are called."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorplay
from tensorplay import Tensor

from mezzo.errors import ScalerProtocolError, ScalingError

from .gradients import Gradients
from .numbers import Numbers

__all__ = ["NonFinite", "Reports", "Steps", "describe"]


@dataclass(frozen=True)
class NonFinite:
    """A parameter whose gradient was not finite.

    Attributes:
        name: The parameter's name.
        nan: How many elements of the gradient were NaN.
        inf: How many were Inf or -Inf.
        numel: How many there are; of a sparse one, how many values.
        dtype: The gradient's dtype, such as ``"float32"``.

    Example:
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


@dataclass
class Steps:
    """The steps of one optimizer.

    Attributes:
        taken: How many were made.
        skipped_in_a_row: How many were skipped since the last one that was made.
        made: Whether the last one was made; None if there was none yet.
        nonfinite: What was not finite at the last one.
        told: Whether it was said that there were no gradients, and there were none since.
    """

    taken: int = 0
    skipped_in_a_row: int = 0
    made: bool | None = None
    nonfinite: tuple[NonFinite, ...] = ()
    told: bool = False

    def step(self, *, made: bool, nonfinite: tuple[NonFinite, ...] = ()) -> None:
        """Take a step down."""
        self.taken += made
        self.skipped_in_a_row = 0 if made else self.skipped_in_a_row + 1
        self.made, self.nonfinite, self.told = made, nonfinite, False


class Reports(Numbers):
    """The part of a `GradScaler` that one can watch."""

    def _start(self) -> None:
        super()._start()
        self._history: weakref.WeakKeyDictionary[Any, Steps] = weakref.WeakKeyDictionary()
        self._names: dict[str, weakref.ref[Any]] = {}

    def stepped(self, optimizer: Any) -> bool:
        """Say whether the last `step` of an optimizer was made; also after `update`.

        A disabled scaler says True; of a step without gradients it is False.

        Raises:
            ScalerProtocolError: The optimizer had no step yet.
        """
        return True if not self._enabled else bool(self._seen(optimizer, "stepped()").made)

    def steps_taken(self, optimizer: Any) -> int:
        """Count the steps of an optimizer that were made; 0 if disabled."""
        steps = self._history.get(optimizer)
        return 0 if steps is None else steps.taken

    def skipped_in_a_row(self, optimizer: Any) -> int:
        """Count the steps of an optimizer that were skipped since the last one that was made; 0 if disabled."""
        steps = self._history.get(optimizer)
        return 0 if steps is None else steps.skipped_in_a_row

    def nonfinite(self, optimizer: Any) -> tuple[NonFinite, ...]:
        """List the parameters whose gradients were not finite at the last `step`; empty if it was made.

        They were counted at that step, so this works after ``zero_grad`` and `update` too.

        Raises:
            ScalerProtocolError: The optimizer had no step yet.

        Example:
            >>> import math
            >>> import tensorplay
            >>> from mezzo.tensorplay import GradScaler
            >>> weight = tensorplay.nn.Parameter(tensorplay.ones(3))
            >>> optimizer = tensorplay.optim.SGD([("head.weight", weight)], lr=0.1)
            >>> scaler = GradScaler("cpu")
            >>> scaler.scale((weight * math.inf).sum()).backward()
            >>> scaler.step(optimizer)
            >>> print(*scaler.nonfinite(optimizer))
            head.weight: 0 NaN, 3 Inf of 3 (float32)
        """
        return () if not self._enabled else self._seen(optimizer, "nonfinite()").nonfinite

    def name_parameters(self, names: Any) -> None:
        """Say what parameters are called in `nonfinite`, in errors and in the log.

        Without it they have the names that the optimizer was given, else they are called by their place in it.

        Args:
            names: A module, a mapping from names to parameters, or pairs of name and parameter.

        Raises:
            ScalingError: It is something else.
        """
        pairs = names.named_parameters() if isinstance(names, tensorplay.nn.Module) else names
        if isinstance(pairs, Mapping):
            pairs = pairs.items()
        listed = list(pairs) if isinstance(pairs, Iterable) else [pairs]
        for pair in listed:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
                msg = (
                    "name_parameters takes a module, a mapping, or pairs of name and parameter, such as "
                    f"model.named_parameters(); got something with a {type(pair).__name__} in it."
                )
                raise ScalingError(msg)
        self._names.update({name: weakref.ref(parameter) for name, parameter in listed})

    def _steps_of(self, optimizer: Any) -> Steps:
        return self._history.setdefault(optimizer, Steps())

    def _seen(self, optimizer: Any, asked: str) -> Steps:
        steps = self._history.get(optimizer)
        if steps is None or steps.made is None:
            msg = f"{asked} was asked of a {type(optimizer).__name__} that this scaler has not stepped. Call step() first."
            raise ScalerProtocolError(msg)
        return steps

    def _nonfinite_in(self, optimizer: Any, gradients: Gradients) -> tuple[NonFinite, ...]:
        found = gradients.count()
        if not found:
            return ()
        names, places = self._names_in(optimizer), gradients.places()
        return tuple(
            NonFinite(names[id(one)], nan, inf, places[id(one)].numel(), dtype_of(places[id(one)]))
            for one, nan, inf in found
        )

    def _names_in(self, optimizer: Any) -> dict[int, str]:
        """Name an optimizer's parameters: as they were given, else as it knows them, else by their places."""
        names: dict[int, str] = {}
        for index, group in enumerate(optimizer.param_groups):
            places = [f"param_groups[{index}]['params'][{at}]" for at in range(len(group["params"]))]
            # There if the optimizer was made from model.named_parameters().
            known = group.get("param_names") or places
            names.update({id(one): name for one, name in zip(group["params"], known, strict=False)})
        given = {id(one): name for name, get in self._names.items() if (one := get()) is not None}
        return {**names, **given}


def dtype_of(tensor: Tensor) -> str:
    """Name a tensor's dtype."""
    return str(tensor.dtype).removeprefix("tensorplay.")


def describe(nonfinite: Iterable[NonFinite], most: int = 5) -> str:
    """Name parameters in one line.

    Args:
        nonfinite: The parameters.
        most: How many to name; of the others the number is said.

    Returns:
        Such as ``"weight: 3 NaN, 0 Inf of 64 (float32); and 2 more"``.
    """
    listed = list(nonfinite)
    rest = f"; and {len(listed) - most} more" if len(listed) > most else ""
    return "; ".join(str(one) for one in listed[:most]) + rest
