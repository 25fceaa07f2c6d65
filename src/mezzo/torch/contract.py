"""The contract with optimizers that unscale and skip by themselves, on the device: ``_step_supports_amp_scaling``.

Such an optimizer's ``step`` is always called. It finds two attributes on the optimizer: ``grad_scale``, a tensor to
divide its gradients by, or None if they are unscaled; and ``found_inf``, a tensor that is not 0 where it must change
nothing. PyTorch's fused optimizers are of this kind. docs/scaling.md has the rules for authors.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor

from mezzo.torch.eager import runs_eagerly

__all__ = ["attributes", "decides_itself", "give_momentum", "takes_scaler", "warn_of_old_form"]

_ABSENT = object()


@runs_eagerly
def decides_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer unscales and skips by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@runs_eagerly
def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer's ``step`` has the old form of the contract, a parameter ``grad_scaler``."""
    # On the instance, where schedulers put their wrapper, or on the class.
    step: Any = vars(optimizer).get("step") or type(optimizer).step
    code = getattr(inspect.unwrap(step), "__code__", None)
    if code is None:
        return "grad_scaler" in inspect.signature(optimizer.step).parameters
    return "grad_scaler" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@runs_eagerly
def warn_of_old_form() -> None:
    """Warn as PyTorch does, in its words."""
    warnings.warn(
        "GradScaler is going to stop passing itself as a keyword argument to the passed "
        "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
        "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
        FutureWarning,
        stacklevel=4,
    )


@runs_eagerly
def give_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give PyTorch's fused SGD the momentum buffers of its first step, as zeros.

    It makes them itself, and where that first step is skipped, as the first ones under a scaler often are, it leaves memory
    in them that nobody has written, and goes on from that (PyTorch 2.13). From zeros, a first step that is made comes out
    the same, unless there is dampening.
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        if not group["momentum"] or group["dampening"]:
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter] if parameter.grad is not None else None
            if state is not None and state.get("momentum_buffer") is None and not parameter.grad.is_sparse:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)


class attributes:  # noqa: N801 - used as a function, a context manager that costs little
    """Set attributes of an optimizer until the end of the region, and put back what was there."""

    @runs_eagerly
    def __init__(self, optimizer: torch.optim.Optimizer, values: dict[str, Tensor | None]) -> None:
        self._place: dict[str, Any] = vars(optimizer)
        self._values = values
        self._before = {name: self._place.get(name, _ABSENT) for name in values}

    @runs_eagerly
    def __enter__(self) -> None:
        """Set them."""
        self._place.update(self._values)

    @runs_eagerly
    def __exit__(self, *_: object) -> None:
        """Put back what was there, also after an exception."""
        for name, value in self._before.items():
            if value is _ABSENT:
                self._place.pop(name, None)
            else:
                self._place[name] = value
