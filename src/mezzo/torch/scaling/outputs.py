"""Scaling what a model gives: a tensor, or any container of tensors, which keeps its shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["scale_nested"]

NOT_TENSORS = "outputs must be a Tensor or an iterable of Tensors"


def scale_nested(outputs: Any, scale: Callable[[Tensor], Tensor], *, field: bool = False) -> Any:
    """Scale each tensor in a container.

    Args:
        outputs: A container: list, tuple, named tuple, mapping, dataclass, or what else is registered with PyTorch's
            pytrees; containers may be nested. Of any other iterable, such as a generator, the result is an iterator.
        scale: What to do with a tensor.
        field: Whether it has a name, in a mapping, a named tuple or a dataclass: there None stays None, for an output that
            is not there.

    Returns:
        A container of the same type with the scaled tensors.

    Raises:
        ValueError: Something in it is neither a tensor nor a container.
    """
    if isinstance(outputs, Tensor):
        return scale(outputs)
    if outputs is None and field:
        return None
    if isinstance(outputs, list | tuple):
        named = hasattr(outputs, "_fields")
        scaled = [scale_nested(each, scale, field=named) for each in outputs]
        # A named tuple takes its fields one by one.
        return type(outputs)(*scaled) if named else type(outputs)(scaled)
    if pytree._get_node_type(outputs) in pytree.SUPPORTED_NODES:
        children, spec = pytree.tree_flatten(outputs, is_leaf=lambda each: each is not outputs)
        return pytree.tree_unflatten([scale_nested(each, scale, field=True) for each in children], spec)
    if isinstance(outputs, Mapping):
        return _copy_of_mapping(outputs, {key: scale_nested(each, scale, field=True) for key, each in outputs.items()})
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        fields = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs) if field.init}
        return dataclasses.replace(
            outputs, **{name: scale_nested(each, scale, field=True) for name, each in fields.items()}
        )
    if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
        return (scale_nested(each, scale) for each in outputs)
    msg = f"{NOT_TENSORS}; got {outputs!r:.80} of type {type(outputs).__name__}. Scale the loss, before backward()."
    raise ValueError(msg)


def _copy_of_mapping(outputs: Mapping[Any, Any], scaled: dict[Any, Any]) -> Any:
    try:
        return type(outputs)(scaled)  # type: ignore[call-arg]
    except TypeError:
        return scaled
