"""Collectives over many tensors in one piece, which scripts take from `apex.parallel.distributed`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["flat_dist_call"]


@torch.no_grad()
def flat_dist_call(
    tensors: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run a collective once for all tensors of a dtype, on a flat copy, and write the results back.

    Args:
        tensors: Of any shapes and dtypes, dense.
        call: Such as ``torch.distributed.broadcast`` or ``all_reduce``; after the latter tensors are divided by the number
            of ranks, so they are means.
        extra_args: Of the call, after the tensor.

    The same call on all ranks.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from mezzo.apex.parallel.flat import flat_dist_call
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ones = [torch.ones(2), torch.ones(1)]
        >>> flat_dist_call(ones, dist.all_reduce)
        >>> ones
        [tensor([1., 1.]), tensor([1.])]
        >>> dist.destroy_process_group()
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in by_kind.values():
        flat = _flatten_dense_tensors(alike)
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()
        for tensor, value in zip(alike, _unflatten_dense_tensors(flat, alike), strict=True):
            tensor.copy_(value)
