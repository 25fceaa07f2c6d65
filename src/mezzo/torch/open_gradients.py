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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mezzo.errors import ScalerProtocolError
from mezzo.torch.gradients import values_of

__all__ = ["OpenGradients"]


@dataclass(frozen=True)
class _Pass:
    """A backward pass that is going on.

    Attributes:
        reached: The parameters that it adds to.
        others: Parameters of which that is not known, with their gradients and the versions of these.
    """

    reached: list[Tensor]
    others: list[tuple[Tensor, Tensor | None, int]]


class OpenGradients:
    """Watches the backward passes of scaled losses, for the optimizers whose gradients are unscaled.

    Args:
        parameters: Gives the parameters of each optimizer whose gradients are unscaled now.
        scale: Gives the scale.
        unscale_again: Called after a pass, with the parameters that it added scaled gradients to.
    """

    def __init__(
        self,
        parameters: Callable[[], list[Tensor]],
        scale: Callable[[], Tensor],
        unscale_again: Callable[[list[Tensor]], None],
    ) -> None:
        self._parameters = parameters
        self._scale = scale
        self._unscale_again = unscale_again
        self._losses: list[weakref.ref[Tensor]] = []
        self._passes: dict[int, _Pass] = {}

    def scaled(self, loss: Tensor, *, watch: bool) -> None:
        """Take note of a scaled loss.

        Args:
            loss: What ``scale`` gives out.
            watch: Watch its backward pass: gradients are unscaled now.
        """
        if not loss.requires_grad:
            return
        if watch:
            loss.register_hook(self._before)
        else:
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
        # One that belongs to two optimizers is there twice.
        parameters = list({id(one): one for one in self._parameters()}.values())
        if not parameters:
            return
        with torch.no_grad():
            reached = [one for one in parameters if _is_reached(one)]
            _multiply_([one.grad for one in reached if one.grad is not None], self._scale())
        known = {id(one) for one in reached}
        others = [(one, one.grad, _version(one.grad)) for one in parameters if id(one) not in known]
        self._passes[this] = _Pass(reached, others)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._after(this))

    def settle(self) -> None:
        """Unscale what backward passes that ended in an exception left scaled."""
        for this in list(self._passes):
            self._after(this)

    def _after(self, this: int) -> None:
        done = self._passes.pop(this)
        changed = [
            (one, gradient)
            for one, gradient, version in done.others
            if one.grad is not None and (one.grad is not gradient or one.grad._version != version)
        ]
        self._unscale_again([*done.reached, *(one for one, gradient in changed if gradient is None)])
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
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:
        return False  # torch.autograd.grad, which adds to no gradient


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _multiply_(gradients: list[Any], scale: Tensor) -> None:
    for gradient in gradients:
        values = values_of(gradient)
        values.mul_(scale.to(values.device, non_blocking=True))
