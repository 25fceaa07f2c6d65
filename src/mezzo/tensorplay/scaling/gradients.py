"""The gradients of an optimizer: divided by the scale, and looked at.

TensorPlay has a kernel that does both, ``_amp_foreach_non_finite_check_and_unscale_``. It is not used here, since (1.0.0)
it passes over tensors of another dtype than the first; takes finite float64 gradients beyond float32 for infinite; sees
Inf in an expanded tensor that has none; divides nothing if anything is not finite; and does not see a quotient overflow.
Nor are ``isfinite`` and ``isinf`` asked about float16 and bfloat16: they know no Inf there. A sum is finite only if all its
terms are; where it is not, NaN and Inf are counted. A product and a sum take half of the kernel's time on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tensorplay
from tensorplay import Tensor

__all__ = ["Gradients", "parameters_of"]

_WIDE = {tensorplay.float32, tensorplay.float64}


def parameters_of(optimizer: Any) -> list[Tensor]:
    """List the parameters of an optimizer, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Gradients:
    """The gradients that an optimizer's parameters have now.

    Each access to ``parameter.grad`` gives another object, so memory says which gradient it is. As long as this one is
    held, a backward pass puts its sum elsewhere, and so nothing is added here unnoticed.

    Attributes:
        parameters: Those that have a gradient.
        values: What is in their gradients, in the same memory: real, without a graph, and of a sparse one its values.
    """

    def __init__(self, optimizer: Any) -> None:
        pairs = [(one, gradient) for one in parameters_of(optimizer) if (gradient := one.grad) is not None]
        self.parameters: list[Tensor] = [one for one, _ in pairs]
        self.values: list[Tensor] = [_values_of(gradient) for _, gradient in pairs]
        self._groups = _grouped(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def of_dtype(self, dtype: Any) -> list[Tensor]:
        """List the parameters whose gradients have a dtype."""
        return [one for one, values in zip(self.parameters, self.values, strict=True) if values.dtype == dtype]

    def places(self) -> dict[int, Tensor]:
        """Give, from the id of each parameter, its gradient's values."""
        return {id(one): values for one, values in zip(self.parameters, self.values, strict=True)}

    def shared_with(self, places: Mapping[int, Tensor]) -> set[int]:
        """Give the ids of the parameters whose gradients are those of other `places`."""
        return {
            id(one)
            for one, values in zip(self.parameters, self.values, strict=True)
            if id(one) in places and is_same(values, places[id(one)])
        }

    def multiply_(self, factor: float, *, but: frozenset[int] | set[int] = frozenset()) -> None:
        """Multiply them in place, as float32 does it, float64 in full.

        Not for float16, for which TensorPlay (1.0.0) rounds the factor to float16.

        Args:
            factor: The number.
            but: The ids of parameters whose gradients stay.
        """
        groups = self._groups
        if but:
            pairs = zip(self.parameters, self.values, strict=True)
            groups = _grouped([values for one, values in pairs if id(one) not in but])
        for group in groups:
            # Two parameters may have been given one gradient.
            distinct = {(values.data_ptr(), values.numel()): values for values in group}
            tensorplay._foreach_mul_(list(distinct.values()), factor)

    def look_finite(self) -> bool:
        """Say whether all of them are finite. False may be wrong, where a sum overflows; one host read per dtype."""
        for group in self._groups:
            if group[0].dtype in _WIDE:
                sums = [values.sum() for values in group]
            else:
                sums = [values.sum(dtype=tensorplay.float32) for values in group]
            if not math.isfinite(tensorplay.stack(sums).sum().item()):
                return False
        return True

    def count(self) -> list[tuple[Tensor, int, int]]:
        """Count NaN and Inf in each gradient that has any; one host read each.

        Returns:
            The parameter, and how many elements of its gradient are NaN and how many Inf.
        """
        found = []
        for one, values in zip(self.parameters, self.values, strict=True):
            wide = values if values.dtype in _WIDE else values.to(tensorplay.float32)
            nan, inf = tensorplay.stack([wide.isnan().sum(), wide.isinf().sum()]).tolist()
            if nan or inf:
                found.append((one, int(nan), int(inf)))
        return found


def is_same(one: Tensor, other: Tensor) -> bool:
    """Say whether two gradients, both of which are held, are one."""
    return bool(one.data_ptr() == other.data_ptr())


def _values_of(gradient: Tensor) -> Tensor:
    values = gradient.detach()
    if values.is_sparse:
        values = values._values()
    return tensorplay.view_as_real(values) if values.is_complex() else values


def _grouped(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Sort tensors by device and dtype."""
    groups: dict[Any, list[Tensor]] = {}
    for one in tensors:
        device = one.device
        groups.setdefault((device.type, device.index, one.dtype), []).append(one)
    return list(groups.values())
