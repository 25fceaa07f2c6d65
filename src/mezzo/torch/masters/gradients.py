"""The gradients of parameters that have a master: where they are float32.

A sum of gradients is float32: of several backward passes, or of the ranks of DDP. One that is alone stays in the dtype it
was computed in, where nothing is lost, and takes half the memory. PyTorch lets a gradient have another dtype than its
tensor (``Tensor.grad_dtype``), and adds to a float32 one in float32.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

if TYPE_CHECKING:
    from .params import Master

__all__ = ["let_go", "link_gradients", "links", "replace_values", "set_gradient"]

links: weakref.WeakValueDictionary[int, Master] = weakref.WeakValueDictionary()
"""From the identity of a model's parameter to its master, which holds that parameter."""


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Give a parameter a gradient, of any floating dtype."""
    if gradient is not None and parameter.grad_dtype not in (None, gradient.dtype):
        parameter.grad = None
        parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def replace_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter values of another dtype; its gradient stays, in its own."""
    gradient = parameter.grad
    parameter.grad = None
    parameter.data = values
    parameter.grad_dtype = values.dtype
    set_gradient(parameter, gradient)


def let_go(master: Master) -> None:
    """After a gradient was set to None: let the next one have the dtype it is computed in, where it may."""
    if master.owner.steps:
        master.owner.forget_failed()
    if master.owner.settings.grad_dtype is None and not master.adds and type(master.model_param) is nn.Parameter:
        master.model_param.grad_dtype = master.model_param.dtype


def link_gradients(master: Master) -> None:
    """Have the gradients of a master's parameter in the dtype that was asked for."""
    parameter, wanted = master.model_param, master.owner.settings.grad_dtype
    if type(parameter) is not nn.Parameter:
        if wanted is not parameter.dtype:
            # FSDP2 assigns gradients by itself, in the dtype of the parameter, and adds to what is there. They are sums over
            # ranks; None lets them have any dtype.
            parameter.grad_dtype = None
            handle = parameter.register_post_accumulate_grad_hook(_widen_gradient)
            master.unlink = weakref.finalize(master, handle.remove)
        return
    if wanted is not None:
        if parameter.grad is not None:
            set_gradient(parameter, parameter.grad.to(wanted))
        else:
            parameter.grad_dtype = wanted
        return
    key, frozen = id(parameter), not parameter.requires_grad

    # It holds no reference: a hook that holds its own tensor is never collected. Copies get one of their own.
    @unserializable_hook  # type: ignore[untyped-decorator]
    def before_adding(gradient: Tensor) -> None:
        _before_adding(key, gradient)

    handle = parameter.requires_grad_(True).register_hook(before_adding)
    if frozen:
        parameter.requires_grad_(False)
    master.unlink = weakref.finalize(master, handle.remove)


@unserializable_hook  # type: ignore[untyped-decorator]
@torch.no_grad()
def _widen_gradient(parameter: Tensor) -> None:
    """Have a gradient that is a sum over ranks in float32, for what is added to it."""
    if parameter.grad is not None and parameter.grad.dtype is not torch.float32:
        parameter.grad = parameter.grad.to(torch.float32)


def _before_adding(key: int, new: Tensor) -> None:
    """Before autograd adds a gradient: let a sum be float32, and the first one of the dtype that it comes in."""
    master = links.get(key)
    if master is None or master.adds:
        return
    parameter = master.model_param
    gradient = parameter.grad
    if gradient is None:
        if parameter.grad_dtype is not new.dtype:
            parameter.grad_dtype = new.dtype
    elif gradient.dtype is not torch.float32:
        set_gradient(parameter, gradient.to(torch.float32))
