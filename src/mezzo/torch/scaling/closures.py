"""Optimizers that evaluate the loss themselves, such as L-BFGS: each evaluation's gradients are unscaled and looked at.

An evaluation that is not finite ends the step, in the midst of whatever the optimizer was doing; so parameters and the
optimizer's state are kept at the start, and put back then. A step is made in full or not at all.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import ScalerProtocolError
from mezzo.torch.eager import runs_eagerly, runs_itself_eagerly
from mezzo.torch.scaling import contract

from .gradients import are_same, parameters_of, versions_of
from .steps import ScalerSteps
from .unscaling import inverse_of
from .verdicts import SCALED, UNSCALED

__all__ = ["Kept", "closure_in", "step_with_closure"]


class _NotFinite(BaseException):
    """Ends an optimizer's step from within its closure; not an `Exception`, which an optimizer may catch."""


@runs_eagerly
def closure_in(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Find the closure among the arguments for an optimizer's ``step``: ``closure=``, or the first if it has that name."""
    given = kwargs.get("closure")
    if args and callable(args[0]) and not isinstance(args[0], Tensor):
        names = contract.parameters_of_step(optimizer)
        if names is None:
            names = tuple(inspect.signature(optimizer.step).parameters)
        first = names[0] if names else ""
        given = args[0] if first in {"closure", "args"} else None
    return given if callable(given) else None


def _snapshot(parameter: Tensor) -> Callable[[], object]:
    return partial(parameter.copy_, parameter.detach().clone())


class Kept:
    """The parameters and the state of an optimizer as they are now, to be put back if a step fails half-way."""

    @runs_eagerly
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # Masters keep the weights of the model with their own.
        self._parameters = [getattr(one, "snapshot", partial(_snapshot, one))() for one in parameters_of(optimizer)]
        self._state = {key: copy.deepcopy(value) for key, value in getattr(optimizer, "state", {}).items()}
        self._numbers = [
            {name: copy.copy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    @runs_eagerly
    def put_back(self) -> None:
        """Put back what was there."""
        with torch.no_grad():
            for put_back in self._parameters:
                put_back()
        for group, numbers in zip(self._optimizer.param_groups, self._numbers, strict=True):
            group.update(numbers)
        if hasattr(self._optimizer, "state"):
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
    kept = Kept(optimizer)
    evaluations = _Evaluations(scaler, optimizer, state, closure_in(optimizer, args, kwargs))
    evaluations.begin()
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
    if not evaluations.count and state["found_inf_per_device"]:
        # It did not call the closure; so nobody has looked at the verdict yet.
        scaler._agree(optimizer, state)
        if scaler._read_verdict(state):
            kept.put_back()
            result = None
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

    @runs_eagerly
    def begin(self) -> None:
        """Unscale what is there before the first evaluation: it may be all there is, or be added to."""
        scaler, state = self._scaler, self._state
        if state["stage"] is SCALED:
            if scaler._scaled_now and scaler._scale is not None:
                scaler._unscale(self._optimizer, state)
            # From here on scaled gradients are unscaled as they come.
            state["stage"] = UNSCALED

    def _call(self) -> tuple[Any, list[Tensor]]:
        scaler, state = self._scaler, self._state
        before, seen, outer = versions_of(self._optimizer), scaler._scaled_unseen, scaler._listen
        outputs: list[Tensor] = []
        scaler._listen, scaler._scaled_unseen = outputs, False
        state["versions"] = before
        try:
            with torch.enable_grad():
                loss = self._closure()
        finally:
            unseen, scaler._listen = scaler._scaled_unseen, outer
            scaler._scaled_unseen = seen
        if unseen:
            self._unscale_unseen(before)
        elif not are_same(state["versions"], versions_of(self._optimizer)):
            # Gradients that were never scaled, or were changed since: only looked at.
            scaler._check_scale_growth_tracker("step")
            scaler._unscale_again_for(self._optimizer, state)
        return loss, outputs

    def _unscale_unseen(self, before: list[tuple[Tensor, int]]) -> None:
        """Unscale after compiled code has scaled, which nobody could watch: possible if all gradients are new."""
        old = {id(gradient): version for gradient, version in before}
        if any(id(gradient) in old for gradient, _ in versions_of(self._optimizer)):
            msg = (
                "A closure whose scale() is compiled has added to gradients that were there. Call optimizer.zero_grad() at "
                "the start of the closure, with set_to_none=True."
            )
            raise ScalerProtocolError(msg)
        self._scaler._unscale(self._optimizer, self._state)
