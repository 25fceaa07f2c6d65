"""Containers of losses: each tensor in them is scaled, and the container stays what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensorplay import Tensor

from mezzo.errors import ScalingError

__all__ = ["scale_nested"]


def scale_nested(outputs: Any, scale: Callable[[Tensor], Tensor]) -> Any:
    """Scale each tensor in a container.

    Args:
        outputs: A tensor, or a list, tuple, named tuple or mapping of such, nested as they may be. Another iterable gives
            an iterator, and is scaled while one iterates.
        scale: Scales one tensor.

    Returns:
        The same container.

    Raises:
        ScalingError: Something in it is no tensor.

    Example:
        >>> import tensorplay
        >>> scale_nested({"loss": [tensorplay.tensor(2.0)]}, lambda loss: loss * 8)
        {'loss': [tensor(16.)]}
    """
    if isinstance(outputs, Tensor):
        return scale(outputs)
    if isinstance(outputs, Mapping):
        return _like(outputs, {key: scale_nested(value, scale) for key, value in outputs.items()})
    if isinstance(outputs, list | tuple):
        items = [scale_nested(value, scale) for value in outputs]
        # A named tuple takes its fields one by one.
        return type(outputs)(*items) if hasattr(outputs, "_fields") else _like(outputs, items)
    if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
        return (scale_nested(value, scale) for value in outputs)
    msg = f"outputs must be a Tensor or an iterable of Tensors; got {outputs!r:.80} of type {type(outputs).__name__}."
    raise ScalingError(msg)


def _like(container: Any, items: Any) -> Any:
    return items if type(container) is type(items) else type(container)(items)
