"""Tensors in pytrees: nests of lists, tuples, mappings and of what else is registered with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Put what a function makes of each tensor in the tensor's place.

    Args:
        function: What to do with a tensor.
        value: A pytree. Objects that are not registered with PyTorch are leaves; tensors in them stay.

    Returns:
        The same nest; the same object where no tensor has changed, so that a container that is written into is not a copy.

    Example:
        >>> import torch
        >>> map_tensors(torch.Tensor.double, {"a": [torch.ones(1)], "b": 2})
        {'a': [tensor([1.], dtype=torch.float64)], 'b': 2}
    """
    if isinstance(value, Tensor):
        return function(value)
    leaves, spec = pytree.tree_flatten(value)
    new = [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if all(one is other for one, other in zip(new, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(new, spec)


def tensors_in(value: Any) -> list[Tensor]:
    """Give the tensors in a pytree, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
