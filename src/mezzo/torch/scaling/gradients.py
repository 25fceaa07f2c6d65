"""The gradients of an optimizer: found, divided by the scale, and looked at for Inf and NaN, whatever their dtype.

PyTorch's kernel, ``_amp_foreach_non_finite_check_and_unscale_``, divides a list of gradients and raises a flag in one pass.
It computes in float32 or wider, and knows neither complex numbers nor float8, nor on some devices bfloat16; those come to it
as real numbers, or as copies in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import ScalerProtocolError
from mezzo.torch.agreement import local

__all__ = [
    "Gradients",
    "are_same",
    "collect",
    "each_parameter_of",
    "parameters_of",
    "values_of",
    "version_of",
    "versions_of",
]

_KNOWN = {torch.float32, torch.float64, torch.float16}
"""What the kernel takes on every device that has it."""

_COMPLEX = {torch.complex64, torch.complex128, torch.complex32}
_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


class Gradients:
    """The gradients of some parameters, listed for the kernel by device, dtype, and what they are to be multiplied by.

    Attributes:
        batches: Lists of gradients; with each its own factor, or None for one over the scale.
    """

    __slots__ = ("_ids", "batches", "originals")

    def __init__(self) -> None:
        self.batches: dict[tuple[torch.device, torch.dtype, int], tuple[list[Tensor], Tensor | None]] = {}
        # Gradients of which only a view, a part or the values are in the lists.
        self.originals: list[Tensor] = []
        self._ids: set[int] | None = None

    def ids(self) -> set[int]:
        """The ids of the gradients, which are held here, so that an id means one of them."""
        if self._ids is None:
            lists = [gradients for gradients, _ in self.batches.values()]
            self._ids = {id(each) for each in itertools.chain(self.originals, *lists)}
        return self._ids

    def unscale_(self, inverse: Tensor, found: Tensor, *, look_again: bool) -> dict[torch.device, Tensor]:
        """Multiply in place, and say on which devices a value was not finite. No host read.

        Args:
            inverse: One over the scale, float32, of no dimension; 1 leaves gradients as they are.
            found: Raised to 1 where a gradient was non-finite; float32, of no dimension.
            look_again: Look at the products too. They can be infinite where the gradients are finite and the scale is
                below 1.

        Returns:
            A flag for each device that has gradients; ``found`` itself for its own device.
        """
        flags: dict[torch.device, Tensor] = {}
        one = torch.ones((), dtype=torch.float32, device=inverse.device) if look_again else None
        done: list[tuple[torch.device, torch.dtype, list[Tensor], Tensor]] = []
        try:
            for (device, dtype, _), (gradients, own) in self.batches.items():
                if device not in flags:
                    flags[device] = found if device == found.device else found.to(device, non_blocking=True, copy=True)
                factor = inverse if own is None else own
                _run_kernel(gradients, device, dtype, flags[device], factor)
                done.append((device, dtype, gradients, factor))
                if one is not None:
                    _run_kernel(gradients, device, dtype, flags[device], one)
        except BaseException:
            # One that the kernel refuses: the others are to be as they were.
            for device, dtype, gradients, factor in done:
                _run_kernel(gradients, device, dtype, torch.zeros((), device=device), factor.reciprocal())
            raise
        return flags


def parameters_of(optimizer: Any) -> list[Tensor]:
    """List the parameters of an optimizer, group by group."""
    return list(each_parameter_of(optimizer))


def each_parameter_of(optimizer: Any) -> Iterator[Tensor]:
    """Give the parameters of an optimizer one by one, for those who mostly need none or few of them."""
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


def version_of(gradient: Tensor) -> int:
    """Give a tensor's version; inference tensors have none."""
    return 0 if gradient.is_inference() else gradient._version


def versions_of(optimizer: torch.optim.Optimizer, most: int | None = None) -> list[tuple[Tensor, int]]:
    """List gradients with their versions, which every write in place counts up: all of an optimizer's, or the first few."""
    found: list[tuple[Tensor, int]] = []
    for parameter in each_parameter_of(optimizer):
        if len(found) == most:
            break
        if parameter.grad is not None:
            found.append((parameter.grad, version_of(parameter.grad)))
    return found


def are_same(some: Sequence[tuple[Tensor | None, int]], others: Sequence[tuple[Tensor, int]]) -> bool:
    """Say whether the gradients are the same tensors, and nobody has written to them."""
    return len(some) == len(others) and all(
        one is other and version == now for (one, version), (other, now) in zip(some, others, strict=True)
    )


def collect(parameters: Iterable[Tensor], factors: Mapping[int, Tensor]) -> Gradients:
    """Find the gradients of parameters.

    Args:
        parameters: Those without a gradient are passed over.
        factors: From ids of parameters to what their gradients are to be multiplied by, where that is not one over the
            scale: 1 for those that are unscaled already.

    Returns:
        The gradients, as what the kernel is to write into: of a sparse one the values, of a DTensor this rank's part. A
        sparse float16 gradient is coalesced first, in float32: duplicates that are finite may add up to an Inf.

    Raises:
        ScalerProtocolError: A parameter is no tensor.
    """
    found = Gradients()
    batches = found.batches
    own, strided, last, batch = None, torch.strided, None, None
    # Once for each parameter at each step: what is the same for neighbours is not looked up again.
    for parameter in parameters:
        try:
            gradient = parameter.grad
        except AttributeError:
            raise ScalerProtocolError(_not_a_tensor(parameter)) from None
        if gradient is None:
            continue
        dtype = gradient.dtype
        if type(gradient) is not Tensor or gradient.layout is not strided or dtype in _COMPLEX:
            original, gradient = _writable(parameter, gradient)
            dtype = gradient.dtype
            found.originals.append(original)
        if factors:
            own = factors.get(id(parameter))
        key = (gradient.device, dtype, id(own))
        if key != last or batch is None:
            batch = batches.setdefault(key, ([], own))[0]
            last = key
        batch.append(gradient)
    return found


def values_of(gradient: Tensor) -> Tensor:
    """Give the numbers that a gradient holds on this rank, as a strided real tensor on the same memory where possible."""
    values = local(gradient)
    if values.layout is torch.sparse_coo:
        values = values._values()
    elif values.layout in _COMPRESSED:
        values = values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values


def _writable(parameter: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Give a gradient, which may be put in another form first, and the tensor that the kernel can write into."""
    if gradient.layout is torch.sparse_coo and gradient.dtype is torch.float16 and not gradient.is_coalesced():
        gradient = gradient.float().coalesce().half().coalesce()
        parameter.grad = gradient
    if gradient.is_complex() and gradient.layout is torch.strided and gradient.is_conj():
        gradient = gradient.resolve_conj()
        parameter.grad = gradient
    return gradient, values_of(gradient)


def _run_kernel(
    gradients: list[Tensor], device: torch.device, dtype: torch.dtype, found: Tensor, inverse: Tensor
) -> None:
    if inverse.device != device:
        inverse = inverse.to(device, non_blocking=True)
    if dtype in _KNOWN or _takes(device.type, dtype):
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        return
    wide = [gradient.float() for gradient in gradients]
    torch._amp_foreach_non_finite_check_and_unscale_(wide, found, inverse)
    for gradient, quotient in zip(gradients, wide, strict=True):
        gradient.copy_(quotient)


_taken: dict[tuple[str, torch.dtype], bool] = {}


def _takes(device_type: str, dtype: torch.dtype) -> bool:
    """Say whether the kernel takes a dtype, which depends on the device and on PyTorch's version."""
    known = _taken.get((device_type, dtype))
    if known is None:
        known = _try_kernel(device_type, dtype)
        # What is true of fake tensors may not be true of the device.
        if not torch._C._len_torch_dispatch_stack():
            _taken[device_type, dtype] = known
    return known


def _try_kernel(device_type: str, dtype: torch.dtype) -> bool:
    try:
        number = torch.ones((), dtype=dtype, device=device_type)
        found, inverse = torch.zeros((), device=device_type), torch.ones((), device=device_type)
        torch._amp_foreach_non_finite_check_and_unscale_([number], found, inverse)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _not_a_tensor(parameter: object) -> str:
    return (
        f"expected param to be torch.Tensor, got {type(parameter).__name__}. An optimizer's param_groups hold tensors under "
        "'params'; give the scaler a torch.optim.Optimizer or an object with such groups."
    )
