"""Optimizers that evaluate the loss themselves, such as L-BFGS: each evaluation's gradients are unscaled and looked at.

An evaluation that is not finite ends the step, in the midst of whatever the optimizer was doing; so parameters and the
optimizer's state are kept at the start, and put back then. A step is made in full or not at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import ScalerProtocolError
from mezzo.torch import contract
from mezzo.torch.eager import runs_eagerly, runs_itself_eagerly
from mezzo.torch.gradients import are_same, parameters_of, versions_of
from mezzo.torch.scaler_steps import ScalerSteps, inverse_of
from mezzo.torch.scaler_verdicts import SCALED, UNSCALED

__all__ = ["closure_in", "step_with_closure"]


class _NotFinite(BaseException):
    """Ends an optimizer's step from within its closure; not an `Exception`, which an optimizer may catch."""


@runs_eagerly
def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Find the closure among the arguments for an optimizer's ``step``: the first one, or ``closure=``."""
    given = args[0] if args else kwargs.get("closure")
    return given if callable(given) and not isinstance(given, Tensor) else None


class _Kept:
    """The parameters and the state of an optimizer as they are now, to be put back if a step fails half-way."""

    @runs_eagerly
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [(one, one.detach().clone()) for one in parameters_of(optimizer)]
        self._state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()}

    @runs_eagerly
    def put_back(self) -> None:
        """Put back what was there."""
        with torch.no_grad():
            for parameter, value in self._parameters:
                parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


@runs_itself_eagerly
def step_with_closure(
    scaler: ScalerSteps,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step an optimizer that evaluates the loss; see `GradScaler.step`."""
    kept = _Kept(optimizer)
    evaluations = _Evaluations(scaler, optimizer, state, closure_in(args, kwargs))
    if args:
        args = (evaluations.evaluate, *args[1:])
    else:
        kwargs = {**kwargs, "closure": evaluations.evaluate}
    result = None
    try:
        with contract.attributes(optimizer, _values(scaler, optimizer)):
            result = optimizer.step(*args, **kwargs)
    except _NotFinite:
        kept.put_back()
    except BaseException:
        kept.put_back()
        raise
    if not evaluations.count:
        kept.put_back()
        msg = f"{type(optimizer).__name__}.step() did not call its closure. Leave the closure out."
        raise ScalerProtocolError(msg)
    if state["found_inf_per_device"]:
        scaler._end_step(optimizer, state)
    else:
        scaler._without_gradients(optimizer)
    return result


@runs_eagerly
def _values(scaler: ScalerSteps, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | None]:
    """What an optimizer finds that would unscale and skip by itself: here that is done in the closure."""
    if not contract.decides_itself(optimizer):
        return {}
    found = torch.zeros((), device=scaler._scale_or_one().device)
    return {"grad_scale": getattr(optimizer, "grad_scale", None), "found_inf": found}


class _Evaluations:
    """The closure that an optimizer gets in place of the user's."""

    def __init__(
        self,
        scaler: ScalerSteps,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        closure: Callable[[], Any] | None,
    ) -> None:
        self.count = 0
        self._scaler = scaler
        self._optimizer = optimizer
        self._state = state
        self._closure: Any = closure

    @runs_eagerly
    def evaluate(self) -> Any:
        """Call the user's closure, unscale what it left, and go on only if that is finite."""
        self.count += 1
        loss, outputs = self._call()
        self._scaler._agree(self._optimizer, self._state)
        if self._state["found_inf_per_device"] and self._scaler._read_verdict(self._state):
            raise _NotFinite
        if any(loss is output for output in outputs):
            # The scaled loss was returned; what a line search compares is the loss.
            return loss.detach() * inverse_of(self._scaler._scale_or_one())
        return loss

    def _call(self) -> tuple[Any, list[Tensor]]:
        scaler, state = self._scaler, self._state
        before, stage = versions_of(self._optimizer), state["stage"]
        scaled_before, outer = scaler._scaled_now, scaler._listen
        outputs: list[Tensor] = []
        scaler._scaled_now, state["stage"], scaler._listen = False, SCALED, outputs
        try:
            with torch.enable_grad():
                loss = self._closure()
        finally:
            scaled, scaler._listen = scaler._scaled_now, outer
            scaler._scaled_now = scaled or scaled_before
        # The closure may unscale by itself, to clip. It may also leave gradients that were there before.
        if state["stage"] is not UNSCALED:
            if are_same(before, versions_of(self._optimizer)):
                scaled, state["stage"] = scaled_before, stage
            self._unscale(scaled=scaled)
        return loss, outputs

    def _unscale(self, *, scaled: bool) -> None:
        if self._state["stage"] is UNSCALED:
            return
        if scaled:
            self._scaler._unscale(self._optimizer, self._state)
        else:
            self._scaler._check_inf_per_device(self._optimizer)
            self._state["stage"] = UNSCALED
