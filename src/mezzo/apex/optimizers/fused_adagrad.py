"""Adagrad under the arguments of Apex's FusedAdagrad."""

from __future__ import annotations

import torch

from mezzo.apex.optimizers.grouped import Parameters
from mezzo.errors import AmpError

__all__ = ["FusedAdagrad"]


class FusedAdagrad(torch.optim.Adagrad):
    """`torch.optim.Adagrad` under the arguments of Apex's FusedAdagrad.

    Args:
        params: Parameters or groups of them.
        lr: The learning rate.
        eps: Added to the divisor.
        weight_decay: The decay, in the gradient.
        set_grad_none: What ``zero_grad()`` does by default: None (True) or zeros.
        adagrad_w_mode: Only False: decay is not decoupled.

    Raises:
        AmpError: ``adagrad_w_mode`` is set.

    Example:
        >>> import torch
        >>> from mezzo.apex.optimizers import FusedAdagrad
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = FusedAdagrad([weight], lr=0.25)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> weight.data
        tensor([0.7500])
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        if adagrad_w_mode:
            msg = "FusedAdagrad(adagrad_w_mode=True) is not there. torch.optim.AdamW has decoupled weight decay."
            raise AmpError(msg)
        super().__init__(params, lr, weight_decay=weight_decay, eps=eps)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset the gradients.

        Args:
            set_to_none: True for None, False for zeros; by default what the constructor was told.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
