"""`Reducer`: gradients averaged over the ranks when the script says so."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Reducer"]


class Reducer:
    """Averages gradients over the ranks on call.

    Args:
        module_or_grads_list: A model, whose parameters are made those of the first rank here; or the gradients.

    Attributes:
        module: The model, or None.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from mezzo.apex.parallel import Reducer
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1)
        >>> reducer = Reducer(model)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> reducer.reduce()
        >>> dist.destroy_process_group()
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            with torch.no_grad():
                for one in self.module.parameters():
                    dist.broadcast(one, 0)
        else:
            self.grads = list(module_or_grads_list)

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace each gradient by its mean over the ranks; parameters without gradient are left out, on all ranks alike."""
        gradients = self.grads
        if self.module is not None:
            gradients = [one.grad for one in self.module.parameters() if one.grad is not None]
        for one in gradients:
            dist.all_reduce(one)
            one.div_(dist.get_world_size())
