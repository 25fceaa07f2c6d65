"""`DistributedDataParallel` with Apex's arguments, on PyTorch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo.apex.parallel.flat import flat_dist_call
from mezzo.errors import AmpError

__all__ = ["DistributedDataParallel", "flat_dist_call"]

# The option that keeps forward passes from sending buffers around was renamed in PyTorch 2.13.
_OPTIONS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """PyTorch's DistributedDataParallel under the arguments of Apex's.

    Arguments of Apex's that only tune its speed are taken and have no effect; those that change numbers do what they did.
    As in Apex, inputs are not moved to a device, and buffers are not sent around at each forward pass, so the statistics of
    batch norms stay those of each rank. Parameters are made those of the first rank once, here.

    Args:
        module: The model, on the CPU or on one device, after ``amp.initialize``.
        message_size: No effect.
        delay_allreduce: No effect. A parameter without gradient in some steps, which Apex put up with then, needs
            ``find_unused_parameters=True`` or ``static_graph=True``; the latter with parameters stored low (O2).
        shared_param: Only None, as in Apex.
        allreduce_trigger_params: No effect.
        retain_allreduce_buffers: No effect; the buffers are not kept.
        allreduce_always_fp32: Whether to add up float16 and bfloat16 gradients in float32.
        num_allreduce_streams: No effect.
        allreduce_communicators: Process groups and streams; the first of the groups is used.
        gradient_average: Whether to give the mean over the ranks. If False, their sum.
        gradient_predivide_factor: Divide by this before adding up, and by the rest of the ranks' number after.
        gradient_average_split_factor: The old name of ``gradient_predivide_factor``.
        prof: No effect.
        **options: More, as PyTorch's own class takes them, such as ``find_unused_parameters``.

    Raises:
        AmpError: ``shared_param`` was given, or a factor that is no positive number.
        ValueError: There is no process group yet, see `torch.distributed.init_process_group`.

    As PyTorch's: one thread, the same calls on all ranks.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from mezzo.apex.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1), delay_allreduce=True)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> model.module.weight.grad
        tensor([[4., 4.]])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        **options: Any,
    ) -> None:
        del (
            message_size,
            delay_allreduce,
            allreduce_trigger_params,
            retain_allreduce_buffers,
            num_allreduce_streams,
            prof,
        )
        if shared_param is not None:
            msg = (
                f"shared_param={shared_param!r}: Apex took no value for it either. Shared parameters need no argument; "
                "leave it out."
            )
            raise AmpError(msg)
        if gradient_average_split_factor is not None:
            gradient_predivide_factor = gradient_average_split_factor
        if not gradient_predivide_factor > 0:
            msg = f"gradient_predivide_factor is a positive number, got {gradient_predivide_factor!r}."
            raise AmpError(msg)
        if allreduce_communicators:
            options.setdefault("process_group", allreduce_communicators[0][0])
        if not {"broadcast_buffers", "forward_sync_buffers"} & options.keys():
            options[_BUFFERS] = False
        super().__init__(module, **options)
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            group = self.process_group
            after = gradient_predivide_factor / group.size() if gradient_average else 1.0
            hook = _adding_up(group, 1 / gradient_predivide_factor, after, wide=allreduce_always_fp32)
            self.register_comm_hook(None, hook)

    def enable_allreduce(self) -> None:
        """Add up gradients over the ranks in the passes that follow, as is the default."""
        self.require_backward_grad_sync = True

    def disable_allreduce(self) -> None:
        """Keep the gradients of the passes that follow on each rank, as in PyTorch's ``no_sync``."""
        self.require_backward_grad_sync = False


def _adding_up(
    group: Any, before: float, after: float, *, wide: bool
) -> Callable[[object, Any], torch.futures.Future[Tensor]]:
    """Make a communication hook that multiplies, adds up over the ranks, and multiplies again."""

    def hook(_state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        held = bucket.buffer()
        sums = held.float() if wide else held
        if before != 1.0:
            sums = sums.mul_(before)
        future = dist.all_reduce(sums, group=group, async_op=True).get_future()

        def finish(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            return held.copy_(done.value()[0].mul_(after))  # type: ignore[no-any-return]

        return future.then(finish)  # type: ignore[no-any-return]

    # DDP compares annotations with classes, and here they are strings.
    hook.__annotations__.clear()
    return hook
