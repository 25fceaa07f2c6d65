"""Adam and AdamW under the arguments of Apex's FusedAdam."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.apex.optimizers.grouped import Parameters, all_on, listed
from mezzo.errors import AmpError

__all__ = ["FusedAdam"]


class FusedAdam(torch.optim.Adam):
    """`torch.optim.Adam` or AdamW under the arguments of Apex's FusedAdam.

    Args:
        params: Parameters or groups of them.
        lr: The learning rate.
        bias_correction: Whether to correct the averages for their start at 0.
        betas: The coefficients of the averages of the gradient and of its square.
        eps: Added to the divisor.
        adam_w_mode: True for decoupled weight decay (AdamW), False for decay in the gradient (Adam).
        weight_decay: The decay.
        amsgrad: Only False, as in Apex.
        set_grad_none: What ``zero_grad()`` does by default: None (True) or zeros.
        capturable: Whether steps can be captured in a CUDA graph.
        master_weights: Only False: float32 masters come from ``amp.initialize`` with O2, or `mezzo.torch.prepare`.

    Raises:
        AmpError: ``amsgrad`` or ``master_weights`` is set.

    Example:
        >>> import torch
        >>> from mezzo.apex.optimizers import FusedAdam
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = FusedAdam([weight], lr=0.1, bias_correction=False)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()  # 0.1 * (0.1 / sqrt(0.001))
        >>> weight.data
        tensor([0.6838])
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            msg = "FusedAdam has no amsgrad, in Apex neither. torch.optim.AdamW(amsgrad=True) has."
            raise AmpError(msg)
        if master_weights:
            msg = (
                "FusedAdam(master_weights=True) is not there: leave it out, and have masters by "
                'amp.initialize(model, optimizer, opt_level="O2") or mezzo.torch.prepare(model, optimizer).'
            )
            raise AmpError(msg)
        params = listed(params)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            capturable=capturable,
            fused=all_on(params, "cpu", "cuda"),
            decoupled_weight_decay=adam_w_mode,
        )
        self.set_grad_none = set_grad_none
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset the gradients.

        Args:
            set_to_none: True for None, False for zeros; by default what the constructor was told.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Collect what a step needs; without bias correction, tell the kernels of a step far in the future."""
        result = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        if not group.get("bias_correction", True):
            steps: list[Tensor] = lists[-1]
            if steps:
                torch._foreach_add_(steps, 1)
            # The corrections 1 - beta ** step are exactly 1 there.
            steps[:] = [torch.full_like(one, 1e30) for one in steps]
        return result
