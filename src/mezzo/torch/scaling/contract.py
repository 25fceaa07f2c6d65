"""The contract with optimizers that unscale and skip by themselves, on the device: ``_step_supports_amp_scaling``.

Such an optimizer's ``step`` is always called. It finds two attributes on the optimizer: ``grad_scale``, a tensor to
divide its gradients by, or None if they are unscaled; and ``found_inf``, a tensor that is not 0 where it must change
nothing. PyTorch's fused optimizers are of this kind. docs/scaling.md has the rules for authors.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from mezzo.torch.eager import runs_eagerly

__all__ = ["attributes", "decides_itself", "give_momentum", "parameters_of_step", "takes_scaler", "warn_of_old_form"]

_ABSENT = object()
_new_forms: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions ``step`` of classes, known to have no parameter ``grad_scaler``."""


@runs_eagerly
def decides_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer unscales and skips by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@runs_eagerly
def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer's ``step`` has the old form of the contract, a parameter ``grad_scaler``."""
    step = getattr(optimizer, "__dict__", {}).get("step") or getattr(type(optimizer), "step", None)
    if step in _new_forms:
        return False
    names = parameters_of_step(optimizer)
    old = "grad_scaler" in (inspect.signature(optimizer.step).parameters if names is None else names)
    if not old and step is getattr(type(optimizer), "step", None) and step is not None:
        _new_forms.add(step)
    return old


def parameters_of_step(optimizer: torch.optim.Optimizer) -> tuple[str, ...] | None:
    """Name the parameters of an optimizer's ``step``, ``self`` left out; None if that takes a closer look."""
    # On the instance, where schedulers put their wrapper, or on the class. `inspect.signature` takes far longer.
    step: Any = getattr(optimizer, "__dict__", {}).get("step") or getattr(type(optimizer), "step", None)
    code = getattr(inspect.unwrap(step), "__code__", None) if step is not None else None
    if code is None or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return None
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names[1:] if names[:1] == ("self",) else names


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
                # A master is float32 whatever its gradient is.
                state["momentum_buffer"] = torch.zeros_like(parameter.grad, dtype=parameter.dtype)


class attributes:  # noqa: N801 - used as a function, a context manager that costs little
    """Set attributes of an optimizer until the end of the region, and put back what was there."""

    @runs_eagerly
    def __init__(self, optimizer: torch.optim.Optimizer, values: dict[str, Tensor | None]) -> None:
        self._optimizer = optimizer
        self._values = values
        # By the optimizer's own ways: it may be a wrapper that passes attributes on.
        self._before = {name: getattr(optimizer, name, _ABSENT) for name in values}
        self._own = {name for name in values if name in getattr(optimizer, "__dict__", {})}

    @runs_eagerly
    def __enter__(self) -> None:
        """Set them."""
        for name, value in self._values.items():
            setattr(self._optimizer, name, value)

    @runs_eagerly
    def __exit__(self, *_: object) -> None:
        """Put back what was there, also after an exception."""
        for name, value in self._before.items():
            inherited = name not in self._own and name in getattr(self._optimizer, "__dict__", {})
            if value is _ABSENT or inherited:
                with contextlib.suppress(AttributeError):
                    delattr(self._optimizer, name)
            else:
                setattr(self._optimizer, name, value)
