"""Gradients that were unscaled stay so until `update`, though more may come: the look that is taken at a backward pass.

``unscale_`` divides the gradients that are there. What a later backward pass of a scaled loss adds in the same iteration is
scaled, and a sum of both would be neither. So while an optimizer's gradients are unscaled, a hook on scaled losses
multiplies those that the pass is going to add to, and divides the sum when the pass is over. It costs nothing where all
backward passes come before ``unscale_``, as they mostly do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mezzo.errors import ScalerProtocolError
from mezzo.torch.agreement import is_distributed, local

from .gradients import values_of, version_of

__all__ = ["OpenGradients", "Owner"]

_MOST_LOSSES = 64
"""How many scaled losses to remember before looking which are still there."""


@dataclass(frozen=True)
class _Pass:
    """A backward pass that is going on.

    Attributes:
        reached: The parameters that it adds to.
        others: Parameters of which that is not known, with their gradients and the versions of these.
    """

    reached: list[Tensor]
    others: list[tuple[Tensor, Tensor | None, int]]


class Owner(Protocol):
    """A scaler, seen from here."""

    def _open_parameters(self, is_reached: Callable[[Tensor], bool]) -> list[Tensor]: ...

    def _unscale_again(self, parameters: list[Tensor]) -> None: ...

    def _scale_or_one(self) -> Tensor: ...


class OpenGradients:
    """Watches the backward passes of scaled losses, for the optimizers whose gradients are unscaled.

    Args:
        owner: The scaler, asked for the parameters whose gradients are unscaled, and told what to unscale after a pass.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._losses: list[weakref.ref[Tensor]] = []
        self._passes: dict[int, _Pass] = {}

    def scaled(self, loss: Tensor, *, watch: bool) -> None:
        """Take note of a scaled loss.

        Args:
            loss: What ``scale`` gives out.
            watch: Watch its backward pass: gradients are unscaled now.
        """
        # Transforms of torch.func have gradients of their own.
        if not loss.requires_grad or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        self.settle()
        if watch:
            loss.register_hook(self._before)
            return
        if len(self._losses) >= _MOST_LOSSES:
            self._losses = [reference for reference in self._losses if reference() is not None]
        self._losses.append(weakref.ref(loss))

    def unscaled(self) -> None:
        """Watch the losses that were scaled before, if they are still held: their backward passes may be to come."""
        for reference in self._losses:
            loss = reference()
            if loss is not None and loss.requires_grad:
                loss.register_hook(self._before)
        self._losses.clear()

    def closed(self) -> None:
        """The iteration is over."""
        self._losses.clear()

    def _before(self, _gradient: Tensor) -> None:
        this = torch._C._current_graph_task_id()
        if this in self._passes:
            return
        reached_ids: dict[int, bool] = {}

        def is_reached(parameter: Tensor) -> bool:
            key = id(parameter)
            if key not in reached_ids:
                reached_ids[key] = _is_reached(parameter)
            return reached_ids[key]

        with torch.no_grad():
            # One that belongs to two optimizers is there twice.
            parameters = list({id(one): one for one in self._owner._open_parameters(is_reached)}.values())
            if not parameters:
                return
            reached = [one for one in parameters if is_reached(one)]
            _multiply_([one.grad for one in reached if one.grad is not None], self._owner._scale_or_one())
        others = [(one, one.grad, _version(one.grad)) for one in parameters if not is_reached(one)]
        self._passes[this] = _Pass(reached, others)
        queue = torch.autograd.Variable._execution_engine.queue_callback
        # From the end of the pass once more to the end: DDP and FSDP write gradients in callbacks of their own.
        queue(lambda: queue(lambda: queue(lambda: self._after(this))))

    def settle(self) -> None:
        """Unscale what backward passes that ended in an exception left scaled."""
        if self._passes and torch._C._current_graph_task_id() == -1:
            for this in list(self._passes):
                self._after(this)

    def _after(self, this: int) -> None:
        done = self._passes.pop(this, None)
        if done is None:
            return
        changed = [
            (one, gradient)
            for one, gradient, version in done.others
            if one.grad is not None and (one.grad is not gradient or _version(one.grad) != version)
        ]
        self._owner._unscale_again([*done.reached, *(one for one, gradient in changed if gradient is None)])
        mixed = sum(gradient is not None for _, gradient in changed)
        if mixed:
            msg = (
                f"A backward pass added scaled gradients to {mixed} parameter(s) whose gradients are unscaled, out of sight "
                "(in a reentrant checkpoint?). Call unscale_() after the last backward pass of the iteration; now zero the "
                "gradients and go on with the next one."
            )
            raise ScalerProtocolError(msg)


def _is_reached(parameter: Tensor) -> bool:
    """Say whether the backward pass that is going on will add to a parameter's gradient."""
    if not parameter.requires_grad:
        return False
    if is_distributed(parameter):
        # FSDP2 writes to it from hooks of other parameters. Multiplied and divided it is the same as before.
        return True
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except (RuntimeError, AttributeError):
        return False  # torch.autograd.grad, which adds to no gradient; or a transform


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else version_of(local(gradient))


def _multiply_(gradients: list[Any], scale: Tensor) -> None:
    for gradient in gradients:
        values = values_of(gradient)
        values.mul_(scale.to(values.device, non_blocking=True))
