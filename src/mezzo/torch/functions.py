"""`custom_fwd` and `custom_bwd`: autograd functions that know about autocast.

The state a forward pass ran in, policy included, is kept on its context, and the backward pass runs in the same state,
whatever region it is called from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from mezzo.errors import RegionError
from mezzo.torch.active import slot_for
from mezzo.torch.autocast import autocast

__all__ = ["cast_inputs_to", "custom_bwd", "custom_fwd"]

F = TypeVar("F", bound=Callable[..., Any])


@overload
def custom_fwd(fwd: F, *, device_type: str, cast_inputs: torch.dtype | None = None) -> F: ...
@overload
def custom_fwd(fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Callable[[F], F]: ...
def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate the ``forward`` of a `torch.autograd.Function` that is called in autocast regions.

    Takes the place of ``torch.amp.custom_fwd``. For functions in the style of ``setup_context``, decorate that method too,
    with the same arguments: it is the one that sees the context.

    Args:
        fwd: The ``forward`` (or ``setup_context``) method; left out when the decorator is called with arguments.
        device_type: The device type whose autocast state counts.
        cast_inputs: If given and autocast is on, cast the eligible tensors among the arguments (on this device, floating,
            not float64; in lists, tuples, named tuples and mappings too) to this dtype and run with autocast off. Without it
            ``forward`` runs in the region as it is.

    Returns:
        The decorated method, or a decorator.

    Raises:
        ValueError: ``device_type`` is not a string.
        TypeError: ``cast_inputs`` is not a dtype.

    Example:
        >>> import torch
        >>> from mezzo.torch import custom_fwd, custom_bwd
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        ...     def forward(ctx, x):
        ...         return x * 2
        ...
        ...     @staticmethod
        ...     @custom_bwd(device_type="cpu")
        ...     def backward(ctx, grad):
        ...         return grad * 2
        >>> with torch.autocast("cpu"):
        ...     print(Double.apply(torch.ones(1, dtype=torch.bfloat16)).dtype)
        torch.float32
    """
    _check_device_type(device_type)
    if cast_inputs is not None and not isinstance(cast_inputs, torch.dtype):
        msg = f"cast_inputs must be a torch.dtype such as torch.float32, got {cast_inputs!r}."
        raise TypeError(msg)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    # setup_context is to see the inputs that forward computed with; the outputs must stay the objects they are.
    sees_outputs = getattr(fwd, "__name__", "") == "setup_context"

    @functools.wraps(fwd)
    def decorate_fwd(*args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_autocast_enabled(device_type)
        if args and hasattr(args[0], "save_for_backward"):
            args[0]._dtype = torch.get_autocast_dtype(device_type)
            args[0]._fwd_used_autocast = enabled and cast_inputs is None
            args[0]._mezzo_policy = slot_for(device_type.split(":")[0]).current().policy
        if cast_inputs is None or not enabled:
            return fwd(*args, **kwargs)
        if sees_outputs:
            ctx, inputs, *outputs = args
            return fwd(ctx, cast_inputs_to(inputs, device_type, cast_inputs), *outputs, **kwargs)
        with autocast(device_type, enabled=False):
            return fwd(
                *cast_inputs_to(args, device_type, cast_inputs), **cast_inputs_to(kwargs, device_type, cast_inputs)
            )

    return decorate_fwd


@overload
def custom_bwd(bwd: F, *, device_type: str) -> F: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[F], F]: ...
def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorate the ``backward`` of a `torch.autograd.Function` whose ``forward`` has `custom_fwd`.

    Takes the place of ``torch.amp.custom_bwd``: ``backward`` runs in the autocast state, dtype and policy of its
    ``forward``.

    Args:
        bwd: The ``backward`` method; left out when the decorator is called with arguments.
        device_type: The device type, as given to `custom_fwd`.

    Returns:
        The decorated method, or a decorator.

    Raises:
        ValueError: ``device_type`` is not a string.
        RegionError: When ``backward`` is called: ``forward`` has left no state on the context.

    Example:
        See `custom_fwd`.
    """
    _check_device_type(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorate_bwd(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(ctx, "_fwd_used_autocast"):
            msg = (
                f"{type(ctx).__name__}: backward has custom_bwd, but its context has no autocast state. Decorate forward "
                "with custom_fwd; if the function has a setup_context method, decorate that with custom_fwd too."
            )
            raise RegionError(msg)
        policy = getattr(ctx, "_mezzo_policy", None)
        with autocast(device_type, enabled=ctx._fwd_used_autocast, dtype=ctx._dtype, policy=policy):
            return bwd(ctx, *args, **kwargs)

    return decorate_bwd


def cast_inputs_to(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Cast the eligible tensors in a nest of containers.

    Args:
        value: Anything. Lists, tuples, named tuples and mappings are rebuilt; other values, strings, arrays and iterators
            among them, are returned as they came.
        device_type: Only tensors on this device are cast.
        dtype: The dtype to cast to.

    Returns:
        The same nest with floating tensors, other than float64, in ``dtype``.
    """
    if isinstance(value, Tensor):
        fits = value.is_floating_point() and value.device.type == device_type and value.dtype is not torch.float64
        return value.to(dtype) if fits else value
    if isinstance(value, Mapping):
        return {
            cast_inputs_to(key, device_type, dtype): cast_inputs_to(item, device_type, dtype)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [cast_inputs_to(item, device_type, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _check_device_type(device_type: object) -> None:
    if not isinstance(device_type, str):
        msg = f"Expected `device_type` of type `str`, got: `{type(device_type)}`"
        raise ValueError(msg)  # PyTorch's own error for this
