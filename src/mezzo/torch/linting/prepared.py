"""Which parameters `mezzo.torch.prepare` has made low, so that nobody is told that they should not be."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from mezzo.torch.masters.preparation import preparation_of
from mezzo.torch.module_names import named_modules

__all__ = ["prepared_names"]


def prepared_names(models: Iterable[nn.Module]) -> frozenset[str]:
    """Name the parameters of models, or of parts of them, that were prepared.

    Args:
        models: The models; names are those below each of them, without the parts that wrappers add.

    Returns:
        Dotted names, also of parameters that `mezzo.torch.prepare` left in float32.

    Example:
        >>> import torch, mezzo.torch
        >>> net = nn.Sequential(nn.Linear(2, 2), mezzo.torch.prepare(nn.Linear(2, 2)))
        >>> sorted(prepared_names([net]))
        ['1.bias', '1.weight']
    """
    return frozenset(
        ".".join(filter(None, (found.name, name)))
        for model in models
        for found in named_modules(model)
        if preparation_of(found.module) is not None
        for name, _ in found.module.named_parameters(remove_duplicate=False)
    )
