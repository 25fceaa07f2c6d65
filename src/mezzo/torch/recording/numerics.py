"""How large the numbers of a tensor are, counted exactly on the tensor's own device.

Nothing is sampled (`mezzo.torch.recording.number_bins`), and nothing of the tensor is kept.

Cost, as CPU time on one thread, of measuring every result of a training step of two transformer layers (width 768, 512
tokens): the step takes 1.6 times as long under bfloat16, 2.1 times under float16, and a tensor of 64 numbers 0.2 to 0.3 ms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mezzo.report.numbers import Numbers
from mezzo.torch.watch_mode import unwatched

from .number_bins import numbers_of, numbers_of_float64

__all__ = ["apart", "has_storage", "is_plain", "measure", "measure_all"]

# Each is exact in the other.
_AS = {torch.float8_e8m0fnu: torch.bfloat16} | dict.fromkeys(
    (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), torch.float16
)
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *_AS)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Give a context in which a tool computes for itself: no autograd, no autocast, and no mode of anybody sees it."""
    with unwatched(), torch._C.DisableTorchFunction():
        yield


def has_storage(tensor: Tensor) -> bool:
    """Say whether a tensor has memory of its own: not sparse, nested, fake, on ``meta``, or a wrapper of others."""
    return (
        # A subclass may do anything with an op; one that only has a name of its own, such as Parameter, has this function.
        type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
        and not tensor._is_zerotensor()  # forward-mode AD's, which has no memory at all
    )


def is_plain(tensor: Tensor) -> bool:
    """Say whether a tensor `has_storage`, and its numbers are those there: none is still to be conjugated or negated."""
    return has_storage(tensor) and not tensor.is_conj() and not tensor.is_neg()


def measure(tensor: Tensor, error: float | None = None) -> Numbers | None:
    """Count how large the numbers of a tensor are and what float16 and bfloat16 would make of them.

    Nothing is sampled: the shares are those that real casts give. The tensor is not changed, autograd and autocast do not
    see it, and nothing of it is kept. On an accelerator the host waits for the counts. May be called in any thread.

    Args:
        tensor: Of any shape and any floating-point or complex dtype; of complex numbers both parts are counted.
        error: The relative error to write down with it.

    Returns:
        The numbers, or None if it has no floating-point numbers that can be read: integers, sparse, nested, quantized,
        fake and ``meta`` tensors, subclasses that wrap others, and dtypes that pack several numbers into a byte.

    Example:
        >>> numbers = measure(torch.tensor([0.0, 1.0, 70000.0, 1e-8]))
        >>> numbers.max_abs, numbers.losses["float16"]
        (70000.0, Loss(overflow=0.25, underflow=0.25, subnormal=0.0))
        >>> dict(numbers.exponents)
        {-27: 1, 0: 1, 16: 1}
        >>> measure(torch.arange(3)) is None
        True
    """
    with apart():
        tensor = tensor.resolve_conj().resolve_neg()
        if not is_plain(tensor):
            return None
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if real.dtype not in _REAL:
            return None
        numbers = _measure(real.detach())
    return numbers if error is None else replace(numbers, error=error)


def measure_all(tensors: Sequence[Tensor], errors: Sequence[float | None] = ()) -> Numbers | None:
    """Measure the results of an op together.

    Args:
        tensors: The results.
        errors: The relative error of each, as `Shadow.follow` gives them; none at all if there was no shadow run.

    Returns:
        `Numbers.merge` of those that can be measured, None if none can.

    Raises:
        ValueError: There are errors, and not as many as tensors.

    Example:
        >>> measure_all([torch.ones(3), torch.arange(3), torch.zeros(2)]).elements
        5
    """
    if errors and len(errors) != len(tensors):
        msg = f"measure_all got {len(tensors)} tensors and {len(errors)} errors; pass one for each tensor, or none."
        raise ValueError(msg)
    pairs = zip(tensors, errors or [None] * len(tensors), strict=True)
    found = [numbers for tensor, error in pairs if (numbers := measure(tensor, error)) is not None]
    return (found[0] if len(found) == 1 else Numbers.merge(found)) if found else None


def _measure(tensor: Tensor) -> Numbers:
    core, times = _without_repeats(tensor)
    if not core.numel():  # of any stride
        core = core.new_empty(0)
    core = core.contiguous()
    numbers = (
        numbers_of_float64(core)
        if core.dtype is torch.float64
        else numbers_of(core.to(_AS.get(core.dtype, core.dtype)))
    )
    if times == 1:
        return numbers
    return replace(
        numbers,
        elements=numbers.elements * times,
        nan=numbers.nan * times,
        inf=numbers.inf * times,
        exponents={exponent: count * times for exponent, count in numbers.exponents.items()},
    )


def _without_repeats(tensor: Tensor) -> tuple[Tensor, int]:
    """Leave out what `expand` repeats: a gradient of a sum is one number, seen a million times."""
    repeated = [stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if not any(repeated) or not tensor.numel():
        return tensor, 1
    core = tensor[tuple(0 if one else slice(None) for one in repeated)]
    return core, tensor.numel() // core.numel()
