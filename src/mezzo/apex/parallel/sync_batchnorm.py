"""Batch norms with statistics over all ranks: PyTorch's under Apex's names."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from mezzo.errors import AmpError

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(nn.SyncBatchNorm):
    """PyTorch's SyncBatchNorm under the arguments of Apex's.

    Args:
        num_features: The number of channels C of inputs ``(N, C, ...)``.
        eps: Added to the variance.
        momentum: Of the running statistics; None for plain means.
        affine: Whether to have a weight and a bias.
        track_running_stats: Whether to keep running statistics.
        process_group: The ranks that share statistics; None for all.
        channel_last: Only False. Inputs in PyTorch's ``channels_last`` memory format need no argument.
        fuse_relu: Only False.

    Raises:
        AmpError: ``channel_last`` or ``fuse_relu`` is set.

    Training with several ranks needs a GPU, as for PyTorch's class.

    Example:
        >>> from mezzo.apex.parallel import SyncBatchNorm
        >>> SyncBatchNorm(8, momentum=0.2).num_features
        8
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        _refuse_channel_last(channel_last)
        if fuse_relu:
            msg = "fuse_relu=True is not there: leave it out, and apply torch.nn.functional.relu to the result."
            raise AmpError(msg)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace all batch norms of a model by `torch.nn.SyncBatchNorm`, with their parameters and buffers.

    Args:
        module: The model; changed in place, unless it is a batch norm itself.
        process_group: The ranks that share statistics; None for all.
        channel_last: Only False. Inputs in PyTorch's ``channels_last`` memory format need no argument.

    Returns:
        The model.

    Raises:
        AmpError: ``channel_last`` is set.

    Call it before ``amp.initialize`` and before the optimizer is made.

    Example:
        >>> import torch
        >>> from mezzo.apex.parallel import convert_syncbn_model
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> type(convert_syncbn_model(model)[1])
        <class 'torch.nn.modules.batchnorm.SyncBatchNorm'>
    """
    _refuse_channel_last(channel_last)
    return nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)  # type: ignore[no-any-return]


def _refuse_channel_last(channel_last: bool) -> None:
    if channel_last:
        msg = (
            "channel_last=True is not there: inputs have the shape (N, C, ...). Leave it out; "
            "x.to(memory_format=torch.channels_last) keeps that shape and has the layout."
        )
        raise AmpError(msg)


def create_syncbn_process_group(group_size: int) -> Any:
    """Make process groups of so many neighbouring ranks, and give this rank's.

    Args:
        group_size: The size; 0 for all ranks.

    Returns:
        The group, for ``process_group=``; None for all ranks.

    Raises:
        AmpError: The size does not divide the number of ranks.

    To be called on all ranks alike.

    Example:
        >>> from mezzo.apex.parallel import create_syncbn_process_group
        >>> create_syncbn_process_group(0) is None
        True
    """
    if group_size == 0:
        return None
    world = dist.get_world_size()
    if not 0 < group_size <= world or world % group_size:
        msg = f"group_size divides the number of ranks, {world}; got {group_size}."
        raise AmpError(msg)
    mine = None
    for first in range(0, world, group_size):
        group = dist.new_group(list(range(first, first + group_size)))
        if first <= dist.get_rank() < first + group_size:
            mine = group
    return mine
