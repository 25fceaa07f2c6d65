"""SGD under the arguments of Apex's FusedSGD."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.apex.optimizers.grouped import Parameters, all_on, listed
from mezzo.errors import AmpError

__all__ = ["FusedSGD"]


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD` under the arguments of Apex's FusedSGD.

    Args:
        params: Parameters or groups of them.
        lr: The learning rate.
        momentum: The momentum.
        dampening: Of the momentum.
        weight_decay: The decay, in the gradient.
        nesterov: Whether to use Nesterov's momentum.
        wd_after_momentum: Only False: decay is added before momentum.
        materialize_master_grads: No effect: masters have gradients.
        set_grad_none: What ``zero_grad()`` does by default: None, or zeros (False).

    Raises:
        AmpError: ``wd_after_momentum`` is set.

    Example:
        >>> import torch
        >>> from mezzo.apex.optimizers import FusedSGD
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = FusedSGD([weight], lr=0.5, momentum=0.9)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000])
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        del materialize_master_grads
        if wd_after_momentum:
            msg = (
                "FusedSGD(wd_after_momentum=True) is not there. torch.optim.AdamW has decay that momentum does not see."
            )
            raise AmpError(msg)
        params = listed(params)
        fused = all_on(params, "cuda")
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, fused=fused)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset the gradients.

        Args:
            set_to_none: True for None, False for zeros; by default what the constructor was told.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
