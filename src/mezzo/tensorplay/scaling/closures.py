"""Optimizers that evaluate the loss themselves, such as L-BFGS: each evaluation's gradients are unscaled and looked at.

An evaluation that is not finite ends the step, in the midst of whatever the optimizer was doing; so parameters and the
optimizer's state are kept at the start, and put back then. A step is made in full or not at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import tensorplay
from tensorplay import Tensor

from mezzo.errors import ScalerProtocolError
from mezzo.scaling import Verdict

from .gradients import Gradients, is_same, parameters_of
from .iterations import SCALED, Turn
from .steps import ScalerSteps

__all__ = ["step_with_closure"]


class _NotFinite(BaseException):
    """Ends an optimizer's step from within its closure; not an `Exception`, which an optimizer may catch."""


class _Kept:
    """The parameters and the state of an optimizer as they are now, to be put back if a step fails half-way."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._parameters = [(one, one.detach().clone()) for one in parameters_of(optimizer)]
        self._state = {key: _copied(value) for key, value in optimizer.state.items()}
        self._numbers = [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    def put_back(self) -> None:
        with tensorplay.no_grad():
            for one, value in self._parameters:
                one.copy_(value)
        for group, numbers in zip(self._optimizer.param_groups, self._numbers, strict=True):
            group.update(numbers)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def step_with_closure(
    scaler: ScalerSteps, turn: Turn, closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Step an optimizer that evaluates the loss.

    Args:
        scaler: The scaler.
        turn: The optimizer's part in the iteration.
        closure: The user's; it scales its loss and calls ``backward`` itself.
        args: For ``step``; the first is the closure, unless that is in ``kwargs``.
        kwargs: For ``step``.

    Returns:
        What ``step`` returns, or None if it was skipped.
    """
    kept = _Kept(turn.optimizer)
    evaluations = _Evaluations(scaler, turn, closure)
    evaluations.begin()
    if "closure" in kwargs:
        kwargs = {**kwargs, "closure": evaluations.evaluate}
    else:
        args = (evaluations.evaluate, *args[1:])
    result = None
    try:
        with scaler._contract(turn):
            result = turn.optimizer.step(*args, **kwargs)
    except _NotFinite:
        pass  # what that says is in `turn`
    except BaseException:
        kept.put_back()
        raise
    if turn.found is None:
        scaler._without_gradients(turn)
        return result
    if turn.found is not Verdict.FINITE:
        # It may have caught everything, or never called the closure.
        kept.put_back()
        result = None
    scaler._end_step(turn)
    return result


class _Evaluations:
    """The closure that an optimizer gets in place of the user's."""

    def __init__(self, scaler: ScalerSteps, turn: Turn, closure: Callable[[], Any]) -> None:
        self._scaler = scaler
        self._turn = turn
        self._closure = closure

    def begin(self) -> None:
        """Unscale what is there before the first evaluation: it may be all there is, or be added to."""
        scaler, turn = self._scaler, self._turn
        if scaler._scale is None:
            # On the device of the parameters; the closure's first `scale` would do it too late for the contract.
            devices = [one.device for one in parameters_of(turn.optimizer)]
            scaler._put_scale(devices[0] if devices else tensorplay.Device(scaler._device))
        if turn.stage is SCALED and scaler._calls:
            scaler._unscale(turn)

    def evaluate(self) -> Any:
        """Call the user's closure, unscale what it left, and go on only if that is finite."""
        scaler = self._scaler
        before = Gradients(self._turn.optimizer)
        # Scaled again, so that the closure may add to them; and if it raises, that is what they are.
        before.multiply_(scaler._state.scale)
        self._turn.stage = SCALED
        for one in parameters_of(self._turn.optimizer):
            scaler._unscaled.pop(id(one), None)
        places = before.places()
        versions = {key: values._version for key, values in places.items()}
        outer, scaler._heard = scaler._heard, []
        try:
            loss = self._closure()
        finally:
            heard, scaler._heard = scaler._heard, outer
        if not heard:
            self._refuse_unscaled(places, versions)
        scaler._unscale(self._turn)
        if self._turn.found not in (Verdict.FINITE, None):
            raise _NotFinite
        if any(loss is output for output in heard):
            # The scaled loss was returned; what a line search compares is the loss.
            return loss.detach() * (1.0 / scaler._state.scale)
        return loss

    def _refuse_unscaled(self, places: dict[int, Tensor], versions: dict[int, int]) -> None:
        now = Gradients(self._turn.optimizer).places()
        same = now.keys() == places.keys() and all(
            is_same(values, places[key]) and values._version == versions[key] for key, values in now.items()
        )
        if not same:
            msg = (
                "The closure has made gradients of a loss that was not scaled. Call scaler.scale(loss).backward() in it, "
                "in place of loss.backward()."
            )
            raise ScalerProtocolError(msg)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    return copy.deepcopy(value)
