"""Prepared models under DistributedDataParallel.

DDP adds up gradients in buckets of the parameters' dtype. A sum is float32 here, unless low ones were asked for; so at
the first forward of a DDP its buckets are made float32, by the way that DDP's own mixed precision takes. DDP also gives
all ranks the model of rank 0, and knows nothing of masters, so these follow then.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from mezzo.errors import PreparationError
from mezzo.torch.eager import runs_eagerly

from .gradients import set_gradient
from .params import Master, master_of, state_of, take_over_writes

__all__ = ["look_for_ddp"]

_seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def look_for_ddp(_module: nn.Module, _args: object) -> None:
    """Set up the DDP in whose forward a prepared model is called, if there is one: a forward pre-hook."""
    # Compiled code is guarded by this: what was compiled without a DDP is compiled anew under one.
    if nn.parallel.DistributedDataParallel._active_ddp_module is not None:
        _look()


def _look() -> None:
    if not dist.is_available():
        return
    ddp: Any = nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is not None and ddp not in _seen:
        _set_up(ddp)
        _seen.add(ddp)


# While code is traced, it is called once and its result is a constant: DDP's first forward is when it is needed.
_look._dynamo_marked_constant = True  # type: ignore[attr-defined]


_watching: list[object] = []


def watch_ddp() -> None:
    """Have every DDP that is made from now on looked at before its forward passes; once per process.

    Compiled code of the model inside would be looked at only when it is compiled, which may be before, or for another model.
    """
    if not _watching:
        _watching.append(register_module_module_registration_hook(_new_child))


def _new_child(module: nn.Module, name: str, _child: nn.Module | None) -> None:
    if name == "module" and isinstance(module, nn.parallel.DistributedDataParallel):
        module.register_forward_pre_hook(_look_at)


@runs_eagerly
def _look_at(ddp: Any, _args: object) -> None:
    if ddp not in _seen:
        _set_up(ddp)
        _seen.add(ddp)


@torch.no_grad()
def _set_up(ddp: Any) -> None:
    masters = [master for one in ddp.module.parameters() if (master := master_of(one)) is not None]
    if not masters:
        return
    summed = [one for one in masters if one.owner.settings.grad_dtype in (None, torch.float32)]
    if summed and any(one.requires_grad for one in summed):
        _widen_buckets(ddp)
        for one in summed:
            one.adds = True
            parameter = one.model_param
            if parameter.grad is None:
                parameter.grad_dtype = torch.float32
            else:
                set_gradient(parameter, parameter.grad.float())
    _broadcast(ddp, masters)


def _widen_buckets(ddp: Any) -> None:
    if ddp.find_unused_parameters and not ddp.static_graph:
        msg = (
            "DistributedDataParallel(find_unused_parameters=True) adds up gradients in the dtype of the parameters, and "
            "those of a prepared model are sums in float32. Use static_graph=True instead of find_unused_parameters, or "
            "prepare the model with grad_dtype=dtype to have gradients added up in the lower precision."
        )
        raise PreparationError(msg)
    reducer = ddp.reducer
    # As DistributedDataParallel(mixed_precision=...) does; then once what it does after the first backward pass.
    reducer._set_mixed_precision_param_dtype(torch.float32)
    reducer._push_all_rebuilt_params()
    if not reducer._rebuild_buckets():
        msg = (
            "The buckets of DistributedDataParallel could not be made float32: it has run a backward pass before. Wrap the "
            "model in a new DistributedDataParallel after mezzo.torch.prepare."
        )
        raise PreparationError(msg)


def _broadcast(ddp: Any, masters: list[Master]) -> None:
    """Give all ranks the masters of rank 0."""
    for one in masters:
        take_over_writes(one)
    values = [one.values() if one.owner.settings.keeps_masters else one.compensation for one in masters]
    tensors = [each for each in values if each is not None]
    if tensors:
        dist._broadcast_coalesced(ddp.process_group, tensors, 250 * 2**20, 0)  # type: ignore[attr-defined]
    for one in masters:
        one.seen = state_of(one.model_param)
