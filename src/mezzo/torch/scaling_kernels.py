"""The two kernels of gradient scaling in Python, for an accelerator that is plugged in and lacks them.

PyTorch's `torch.amp.GradScaler`, and mezzo's, need two ops of the device: ``_amp_foreach_non_finite_check_and_unscale_`` and
``_amp_update_scale_``. Here they are made of ops that any backend has which can train (``sub``, ``sum``, ``mul``, ``where``,
``copy_`` and the like), and give what PyTorch's own kernels give, to the last bit. Nothing is read on the host. A backend
that has kernels of its own keeps them: those take a pass over the gradients, these take three.

The other variants of the two ops, which write into ``out`` or return new tensors, are made by PyTorch from these.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mezzo.errors import DeviceError, DtypeError
from mezzo.torch.eager import runs_eagerly

__all__ = ["non_finite_check_and_unscale_", "register_scaling_kernels", "update_scale_"]

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
UPDATE = "_amp_update_scale_"

_NARROW = frozenset({torch.float16, torch.bfloat16})
_KNOWN = _NARROW | {torch.float32, torch.float64}

_PIECE = 2**22
"""How many elements of a gradient are worked on at a time: of these there is a copy in float32."""

_INT32 = range(-(2**31), 2**31)

Named = tuple[str, Tensor, torch.dtype]


@runs_eagerly
def non_finite_check_and_unscale_(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients in place, and raise a flag if a value was Inf or NaN before.

    A product that overflows raises no flag. Gradients in float16 and bfloat16 are multiplied in float32 and rounded once,
    those in float64 are multiplied in float64. A factor of 1 changes nothing, except that a signalling NaN becomes a quiet
    one.

    Args:
        gradients: Strided tensors of any shapes, in float16, bfloat16, float32 or float64, also mixed, on one device. If
            there is none, nothing is done and nothing is checked.
        found_inf: float32, of one element, on that device. Set to 1 for an Inf or NaN, else left as it is.
        inv_scale: What to multiply by; float32, of one element, on that device.

    Raises:
        DeviceError: A tensor is on another device.
        DtypeError: ``found_inf`` or ``inv_scale`` is not float32.
        NotImplementedError: A gradient is in another dtype.
        RuntimeError: ``found_inf`` or ``inv_scale`` has not one element; a gradient is not strided, or several of its
            elements are at one place in memory, as after ``expand``. Whatever is raised, nothing has been written.

    Example:
        >>> import torch
        >>> gradient, found_inf = torch.tensor([8.0, 4.0]), torch.zeros(())
        >>> non_finite_check_and_unscale_([gradient], found_inf, torch.tensor(0.5))
        >>> gradient, found_inf
        (tensor([4., 2.]), tensor(0.))
    """
    if not gradients:
        return
    device = _own_device((gradients[0], inv_scale, found_inf))
    _check_numbers((("inv_scale", inv_scale, torch.float32), ("found_inf", found_inf, torch.float32)), device)
    for gradient in gradients:
        _check_gradient(gradient, device)
    # A scaler may be stepped inside a region, whose policy may know any of the ops used here.
    with torch._C._DisableAutocast():
        factor = inv_scale.reshape(())
        flags = [_unscale_piece(piece, factor) for gradient in gradients for piece in _pieces(gradient)]
        # A sum of zeros, or NaN.
        total = torch.stack(flags).sum()
        found_inf.masked_fill_(total != total, 1.0)


@runs_eagerly
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> Tensor:
    """Move the scale and its tracker in place after an iteration.

    After a finite one the tracker counts one up. If it is then equal to the interval, it starts again from 0, and the scale
    grows, unless it would be infinite. A tracker that is beyond the interval never comes to equal it. After another one the
    scale backs off and the tracker starts again from 0.

    The products are computed in float64 and rounded once. On a device without float64 they are computed in float32 from
    factors rounded to float32: exactly the same for factors that are powers of two, at most one unit in the last place away
    for others that float32 can hold.

    Args:
        scale: float32, of one element.
        growth_tracker: How many finite iterations there were in a row; int32, of one element, on the same device.
        found_inf: 0 if the iteration was finite; float32, of one element, on the same device. NaN is not 0.
        growth_factor: What the scale is multiplied by after enough finite iterations.
        backoff_factor: What the scale is multiplied by after one that was not finite.
        growth_interval: How many finite iterations in a row are enough.

    Returns:
        ``scale`` itself.

    Raises:
        DeviceError: The tensors are not on one device.
        DtypeError: A tensor has another dtype.
        RuntimeError: A tensor has not one element. Whatever is raised, nothing has been written.

    Example:
        >>> import torch
        >>> scale, tracker = torch.tensor(1024.0), torch.tensor(0, dtype=torch.int32)
        >>> update_scale_(scale, tracker, torch.tensor(1.0), 2.0, 0.5, 2000)
        tensor(512.)
    """
    device = _own_device((scale, growth_tracker, found_inf))
    named = (
        ("growth_tracker", growth_tracker, torch.int32),
        ("current_scale", scale, torch.float32),
        ("found_inf", found_inf, torch.float32),
    )
    _check_numbers(named, device)
    with torch._C._DisableAutocast():
        _move(scale, growth_tracker, found_inf, (growth_factor, backoff_factor), growth_interval)
    return scale


_lock = threading.Lock()
_libraries: list[torch.library.Library] = []


def register_scaling_kernels(backend_key: str = "PrivateUse1") -> tuple[str, ...]:
    """Give a backend the kernels of gradient scaling that it lacks; those that it has stay.

    May be called from several threads, and again: what is registered stays registered, for the life of the process.

    Args:
        backend_key: The dispatch key of the backend.

    Returns:
        The names of the ops for which this call has registered a kernel.

    Raises:
        RuntimeError: PyTorch knows no such dispatch key.

    Example:
        >>> register_scaling_kernels("CPU")  # it has its own
        ()
    """
    kernels = {UNSCALE: non_finite_check_and_unscale_, UPDATE: update_scale_}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    with _lock:
        missing = tuple(name for name in kernels if not has_kernel(f"aten::{name}", backend_key))
        if missing:
            library = torch.library.Library("aten", "IMPL")
            # A library takes its kernels with it when it is collected.
            _libraries.append(library)
            for name in missing:
                library.impl(name, kernels[name], backend_key)
    return missing


def _unscale_piece(piece: Tensor, factor: Tensor) -> Tensor:
    """Multiply in place, and give NaN if a value was not finite, else 0; float32, of no dimension."""
    wide = piece.float() if piece.dtype in _NARROW else piece
    # Inf minus Inf is NaN. This needs fewer passes than `isfinite`, and no reduction that a device may let lose a NaN.
    flag = (wide - wide).sum()
    wide.mul_(factor)
    if wide is not piece:
        piece.copy_(wide)
    # Even a `to` that has nothing to do would cost a tenth of all this.
    return flag.float() if flag.dtype is torch.float64 else flag


def _move(scale: Tensor, tracker: Tensor, found_inf: Tensor, factors: tuple[float, float], interval: int) -> None:
    now = scale.reshape(())
    wide = now.to(torch.float64 if _takes_float64(now.device.type) else torch.float32)
    grown, backed_off = ((wide * factor).to(torch.float32) for factor in factors)
    finite = found_inf.reshape(()) == 0
    streak = tracker.reshape(()) + 1
    # An int32 tensor must not be compared with a number that int32 cannot hold; it never equals one.
    full = streak == interval if interval in _INT32 else streak != streak
    after_finite = torch.where(full & grown.isfinite(), grown, now)
    scale.copy_(torch.where(finite, after_finite, backed_off))
    tracker.copy_(streak.masked_fill(full | ~finite, 0))


def _pieces(gradient: Tensor) -> Iterator[Tensor]:
    if gradient.numel() > _PIECE and gradient.is_contiguous():
        yield from gradient.view(-1).split(_PIECE)
    else:
        yield gradient


def _own_device(tensors: Sequence[Tensor]) -> torch.device:
    """Find the device that is meant: of tensors on several, the dispatcher goes by the one on the accelerator."""
    accelerator = torch._C._get_privateuse1_backend_name()
    devices = [tensor.device for tensor in tensors]
    return next((device for device in devices if device.type == accelerator), devices[0])


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    # Some backends leave out the index where there is one device.
    own = tensor.device
    return own == device or (own.type == device.type and None in (own.index, device.index))


def _check_numbers(named: Sequence[Named], device: torch.device) -> None:
    # The order of the checks, and the beginnings of their texts, are those of PyTorch's kernels.
    for name, tensor, _ in named:
        if not _is_on(tensor, device):
            msg = f"{name} must be a {device.type.upper()} tensor. It is on {tensor.device}, others are on {device}; "
            raise DeviceError(msg + f"move it there with {name}.to('{device}').")
    for name, tensor, _ in named:
        if tensor.numel() != 1:
            msg = f"{name} must be a 1-element tensor. Its shape is {tuple(tensor.shape)}; pass one of shape ()."
            raise RuntimeError(msg)
    for name, tensor, dtype in named:
        if tensor.dtype is not dtype:
            kind = "an int" if dtype is torch.int32 else "a float"
            msg = f"{name} must be {kind} tensor. It is {tensor.dtype}; convert it with {name}.to({dtype})."
            raise DtypeError(msg)


def _check_gradient(gradient: Tensor, device: torch.device) -> None:
    if not _is_on(gradient, device):
        msg = (
            f"one of scaled_grads was not a {device.type.upper()} tensor. It is on {gradient.device}, others are on "
            f"{device}; call the op once for each device, with found_inf and inv_scale on that device."
        )
        raise DeviceError(msg)
    if gradient.layout is not torch.strided:
        msg = (
            f"one of scaled_grads was not a strided tensor. Its layout is {gradient.layout}; pass its values, such as "
            "gradient.coalesce().values()."
        )
        raise RuntimeError(msg)
    if gradient.dtype not in _KNOWN:
        msg = (
            f'"{UNSCALE}" not implemented for {gradient.dtype}. It takes gradients in float16, bfloat16, float32 and '
            "float64; pass a complex one as torch.view_as_real(gradient), another as a copy in float32."
        )
        raise NotImplementedError(msg)
    if not gradient.is_contiguous() and _repeats(gradient):
        msg = (
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            f"Please clone() the tensor before performing the operation. A gradient of shape {tuple(gradient.shape)} has "
            f"the strides {tuple(gradient.stride())}."
        )
        raise RuntimeError(msg)


def _repeats(gradient: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(gradient.shape, gradient.stride(), strict=True))


_with_float64: dict[str, bool] = {}


def _takes_float64(device_type: str) -> bool:
    """Say whether a device computes in float64: tried once per process."""
    known = _with_float64.get(device_type)
    if known is None:
        known = _try_float64(device_type)
        # What is true of fake tensors may not be true of the device.
        if not torch._C._len_torch_dispatch_stack():
            _with_float64[device_type] = known
    return known


def _try_float64(device_type: str) -> bool:
    try:
        number = torch.ones((), dtype=torch.float32, device=device_type)
        product = number.to(torch.float64) * 1.5
        product.to(torch.float32)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    # Some devices compute in float32 in its stead.
    return product.dtype is torch.float64
