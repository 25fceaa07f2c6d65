"""`half_function`, `float_function` and `promote_function`: functions that get their arguments cast while O1 is on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from torch import Tensor

from mezzo.apex.amp.cast_switches import casts_on
from mezzo.decision import CastPolicy
from mezzo.errors import AmpTypeError
from mezzo.torch.casting import ELIGIBLE
from mezzo.torch.foreign_calls import _cast, _target

__all__ = ["float_function", "half_function", "promote_function", "with_cast_arguments"]

F = TypeVar("F", bound=Callable[..., Any])


def half_function(fn: F) -> F:
    """Have a function called with its floating-point tensors in the lower-precision dtype of O1.

    Cast are tensors on the devices of O1, among the arguments and in lists and tuples that hold nothing but floating-point
    tensors. float64 stays, and so do dicts and lists of anything else. O1 stays on while the function runs, so the ops in
    it are cast as anywhere. Gradients come back in the dtypes that came in. While O1 is off, inside `disable_casts`, and in
    a disabled autocast region, the function is called as it is.

    Args:
        fn: A function, a method such as a module's ``forward``, or the static ``forward`` of a `torch.autograd.Function`.

    Returns:
        The wrapped function; ``functools.wraps`` is applied.

    Raises:
        AmpTypeError: ``fn`` is a class or cannot be called.

    Example:
        >>> import torch
        >>> from mezzo.apex import amp
        >>> @amp.half_function
        ... def scores(q, k):
        ...     return q.dtype, k.dtype
        >>> handle = amp.init()
        >>> scores(torch.ones(2), k=torch.ones(2))
        (torch.float16, torch.float16)
        >>> handle._deactivate()
        >>> scores(torch.ones(2), k=torch.ones(2))
        (torch.float32, torch.float32)
    """
    return with_cast_arguments(fn, CastPolicy.LOWER_PRECISION_FP)


def float_function(fn: F) -> F:
    """Have a function called with its floating-point tensors in float32; all else as for `half_function`.

    Args:
        fn: The function.

    Returns:
        The wrapped function.

    Raises:
        AmpTypeError: ``fn`` is a class or cannot be called.

    Example:
        >>> import torch
        >>> from mezzo.apex import amp
        >>> handle = amp.init()
        >>> amp.float_function(lambda x: x.dtype)(torch.ones(2).half())
        torch.float32
        >>> handle._deactivate()
    """
    return with_cast_arguments(fn, CastPolicy.FP32)


def promote_function(fn: F) -> F:
    """Have a function called with its floating-point tensors in the widest of their dtypes; all else as for `half_function`.

    Args:
        fn: The function.

    Returns:
        The wrapped function. float16 beside bfloat16, where neither is wider, become float32.

    Raises:
        AmpTypeError: ``fn`` is a class or cannot be called.

    Example:
        >>> import torch
        >>> from mezzo.apex import amp
        >>> handle = amp.init()
        >>> amp.promote_function(lambda x, y: (x.dtype, y.dtype))(torch.ones(2).half(), torch.ones(2))
        (torch.float32, torch.float32)
        >>> handle._deactivate()
    """
    return with_cast_arguments(fn, CastPolicy.PROMOTE)


def with_cast_arguments(fn: F, rule: CastPolicy) -> F:
    """Wrap a function so that its arguments are cast while O1 is on.

    Args:
        fn: The function; a ``staticmethod`` or ``classmethod`` object gives one of its kind.
        rule: ``lower_precision_fp``, ``fp32`` or ``promote``.

    Returns:
        The wrapped function.

    Raises:
        AmpTypeError: ``fn`` is a class or cannot be called.
    """
    if isinstance(fn, staticmethod | classmethod):
        return cast("F", type(fn)(with_cast_arguments(fn.__func__, rule)))
    if isinstance(fn, type) or not callable(fn):
        shown = f"the class {fn.__name__}" if isinstance(fn, type) else repr(fn)
        msg = f"amp decorates functions and methods, got {shown}; put it on the method that is to be cast, such as forward."
        raise AmpTypeError(msg)

    @functools.wraps(fn)
    def with_casts(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast_arguments(rule, args, kwargs)
        return fn(*args, **kwargs)

    return cast("F", with_casts)


def _cast_arguments(
    rule: CastPolicy, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found = [tensor for value in (*args, *kwargs.values()) for tensor in _eligible_in(value)]
    devices = [device for device in {tensor.device.type: None for tensor in found} if casts_on(device)]
    if not devices:
        return args, kwargs
    dtypes = {tensor.dtype for tensor in found if tensor.device.type in devices}
    targets = {device: _target(rule, dtypes, device) for device in devices}

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            target = targets.get(value.device.type)
            return value if target is None or value.dtype not in ELIGIBLE else _cast(value, target, rule)
        if isinstance(value, list | tuple) and _holds_only_floats(value):
            return _like(value, [convert(one) for one in value])
        return value

    return tuple([convert(value) for value in args]), {name: convert(value) for name, value in kwargs.items()}


def _eligible_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.dtype in ELIGIBLE:
            yield value
    elif isinstance(value, list | tuple) and _holds_only_floats(value):
        for one in value:
            yield from _eligible_in(one)


def _holds_only_floats(values: list[Any] | tuple[Any, ...]) -> bool:
    return all(
        _holds_only_floats(value)
        if isinstance(value, list | tuple)
        else isinstance(value, Tensor) and value.is_floating_point()
        for value in values
    )


def _like(values: Any, new: list[Any]) -> Any:
    """Make a list or tuple of the same class; the same object if nothing in it has changed."""
    if all(one is other for one, other in zip(new, values, strict=True)):
        return values
    if hasattr(values, "_fields"):  # a namedtuple
        return type(values)(*new)
    return type(values)(new)
