"""`custom_fwd` and `custom_bwd`: autograd functions that know about autocast.

The state a forward pass ran in, policy included, is kept on its context, and the backward pass runs in the same state,
whatever region it is called from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import tensorplay
from tensorplay import Tensor

from mezzo.errors import RegionError
from mezzo.tensorplay.autocast import autocast
from mezzo.tensorplay.policies import active_policy
from mezzo.tensorplay.queries import get_autocast_dtype, is_autocast_enabled

__all__ = ["custom_bwd", "custom_fwd"]

F = TypeVar("F", bound=Callable[..., Any])


@overload
def custom_fwd(fwd: F, *, device_type: str, cast_inputs: Any = None) -> F: ...
@overload
def custom_fwd(fwd: None = None, *, device_type: str, cast_inputs: Any = None) -> Callable[[F], F]: ...
def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: Any = None) -> Any:
    """Decorate the ``forward`` of a `tensorplay.autograd.Function` that is called in autocast regions.

    Takes the place of ``tensorplay.amp.custom_fwd``. For functions with a ``setup_context``, decorate that method too, with
    the same arguments: it is the one that sees the context.

    Args:
        fwd: The ``forward`` (or ``setup_context``) method; left out when the decorator is called with arguments.
        device_type: The device type whose autocast state counts: ``"cpu"`` or ``"cuda"``.
        cast_inputs: If given and autocast is on, cast the eligible tensors among the arguments (on this device, floating,
            not float64; in lists, tuples, named tuples and mappings too) to this dtype and run with autocast off. Without it
            ``forward`` runs in the region as it is.

    Returns:
        The decorated method, or a decorator.

    Raises:
        ValueError: ``device_type`` is not a string, or TensorPlay has no autocast for it (when ``forward`` is called).
        TypeError: ``cast_inputs`` is not a dtype.

    Example:
        >>> import tensorplay
        >>> from mezzo.tensorplay import autocast, custom_bwd, custom_fwd
        >>> class Double(tensorplay.autograd.Function):
        ...     @staticmethod
        ...     @custom_fwd(device_type="cpu", cast_inputs=tensorplay.float32)
        ...     def forward(ctx, x):
        ...         return x * 2
        ...
        ...     @staticmethod
        ...     @custom_bwd(device_type="cpu")
        ...     def backward(ctx, grad):
        ...         return grad * 2
        >>> with autocast("cpu"):
        ...     print(Double.apply(tensorplay.ones(1, dtype=tensorplay.bfloat16)).dtype)
        tensorplay.float32
    """
    _check_device_type(device_type)
    if cast_inputs is not None and not isinstance(cast_inputs, tensorplay.DType):
        msg = f"cast_inputs must be a dtype of TensorPlay such as tensorplay.float32, got {cast_inputs!r}."
        raise TypeError(msg)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    # setup_context is to see the inputs that forward computed with; the outputs must stay the objects they are.
    sees_outputs = getattr(fwd, "__name__", "") == "setup_context"

    @functools.wraps(fwd)
    def decorate_fwd(*args: Any, **kwargs: Any) -> Any:
        enabled = is_autocast_enabled(device_type)
        if args and hasattr(args[0], "save_for_backward"):
            args[0]._dtype = get_autocast_dtype(device_type)
            args[0]._fwd_used_autocast = enabled and cast_inputs is None
            args[0]._mezzo_policy = active_policy(device_type)
        if cast_inputs is None or not enabled:
            return fwd(*args, **kwargs)
        if sees_outputs:
            ctx, inputs, *outputs = args
            return fwd(ctx, _cast_to(inputs, device_type, cast_inputs), *outputs, **kwargs)
        with autocast(device_type, enabled=False):
            return fwd(*_cast_to(args, device_type, cast_inputs), **_cast_to(kwargs, device_type, cast_inputs))

    return decorate_fwd


@overload
def custom_bwd(bwd: F, *, device_type: str) -> F: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[F], F]: ...
def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorate the ``backward`` of a `tensorplay.autograd.Function` whose ``forward`` has `custom_fwd`.

    Takes the place of ``tensorplay.amp.custom_bwd``: ``backward`` runs in the autocast state, dtype and policy of its
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
        policy = getattr(ctx, "_mezzo_policy", None)  # TensorPlay's own custom_fwd leaves none
        with autocast(device_type, enabled=ctx._fwd_used_autocast, dtype=ctx._dtype, policy=policy):
            return bwd(ctx, *args, **kwargs)

    return decorate_bwd


def _cast_to(value: Any, device_type: str, dtype: Any) -> Any:
    """Cast the eligible tensors in a nest of lists, tuples and mappings; strings, arrays and iterators are left alone."""
    if isinstance(value, Tensor):
        fits = value.is_floating_point() and value.device.type == device_type and value.dtype != tensorplay.float64
        return value.to(dtype) if fits else value
    if isinstance(value, Mapping):
        return {_cast_to(key, device_type, dtype): _cast_to(item, device_type, dtype) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_cast_to(item, device_type, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _check_device_type(device_type: object) -> None:
    if not isinstance(device_type, str):
        msg = f"Expected `device_type` of type `str`, got: `{type(device_type)}`"
        raise ValueError(msg)  # TensorPlay's own error for this
