"""Several losses with a scaler each: their gradients, unscaled each by its own scaler, are added up and stepped with once.

What ``num_losses`` was in Apex. The scale of one loss does not hear of another's overflow.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mezzo.errors import ScalerProtocolError, SkippedStepsError
from mezzo.torch.scaling import contract

from .gradients import are_same, parameters_of, versions_of
from .updating import add_up
from .verdicts import SCALED, STEPPED, UNSCALED

if TYPE_CHECKING:
    from .steps import ScalerSteps

__all__ = ["merging", "refuse_others", "step_merged"]

_inside: set[int] = set()
"""The ids of the optimizers in whose `merge` regions we are; each is held by its region."""

_merged: weakref.WeakSet[ScalerSteps] = weakref.WeakSet()
"""The scalers that have ever merged."""


@contextmanager
def merging(scaler: ScalerSteps, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Unscale what backward passes in the region add; see `GradScaler.merge`."""
    _enter(scaler, optimizer)
    state = scaler._state_of(optimizer) if scaler._enabled else {}
    kept = dict(state)
    parameters = parameters_of(optimizer)
    others = [parameter.grad for parameter in parameters]
    scaled_before, scaler._scaled_now = scaler._scaled_now, False
    # Here there are only this loss's gradients, and those are scaled.
    state["merging"], state["stage"], state["found_inf_per_device"] = True, SCALED, {}
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
        if scaler._enabled:
            _unscale_new(scaler, optimizer, state)
    except BaseException:
        for parameter, other in zip(parameters, others, strict=True):
            parameter.grad = other
        state.clear()
        state.update(kept)
        scaler._scaled_now = scaled_before
        raise
    finally:
        _inside.discard(id(optimizer))
        state["merging"] = False
    scaler._scaled_now = scaler._scaled_now or scaled_before
    for device, flag in kept.get("found_inf_per_device", {}).items():
        found = state["found_inf_per_device"].setdefault(device, flag)
        state["found_inf_per_device"][device] = add_up([found, flag], device)
    _add(parameters, others)
    state["sum"] = versions_of(optimizer, most=1)
    if scaler._enabled:
        _merged.add(scaler)


def refuse_others(scaler: ScalerSteps, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a plain step of an optimizer that has gradients of other scalers too, whose verdicts it would not ask for.

    Raises:
        ScalerProtocolError: It has.
    """
    for other in list(_merged):
        state = other._per_optimizer_states.get(id(optimizer), {})
        if other is not scaler and state.get("sum") and state["stage"] is UNSCALED:
            msg = "Several scalers have merged gradients for this optimizer. Call step_merged(optimizer, scalers)."
            raise ScalerProtocolError(msg)


def _enter(scaler: ScalerSteps, optimizer: torch.optim.Optimizer) -> None:
    if id(optimizer) in _inside:
        msg = "merge() regions of one optimizer cannot be nested. End one before the next loss's backward pass."
        raise ScalerProtocolError(msg)
    if scaler._enabled:
        scaler._open.settle()
        state = scaler._state_of(optimizer)
        if state["stage"] is STEPPED:
            msg = "merge() is being called after step(). Call it before step_merged(), or update() first."
            raise ScalerProtocolError(msg)
        if state["stage"] is not UNSCALED and scaler._scaled_now:
            # Gradients of this scaler that came before, without merge().
            scaler._unscale(optimizer, state)
    _inside.add(id(optimizer))


def _unscale_new(scaler: ScalerSteps, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    if scaler._scaled_now:
        if state["stage"] is SCALED:
            scaler._unscale(optimizer, state)
    elif any(parameter.grad is not None for parameter in parameters_of(optimizer)):
        msg = (
            "Gradients came in a merge() region in which this scaler's scale() was not called. Call "
            "scaler.scale(loss).backward() with the scaler whose merge() it is."
        )
        raise ScalerProtocolError(msg)
    state["stage"] = UNSCALED


@torch.no_grad()
def _add(parameters: Sequence[Tensor], others: Sequence[Tensor | None]) -> None:
    for parameter, other in zip(parameters, others, strict=True):
        if other is None:
            continue
        if parameter.grad is not None and other.layout is torch.strided:
            other.add_(parameter.grad)
        elif parameter.grad is not None:
            other = other + parameter.grad  # noqa: PLW2901 - sparse ones are not added in place
        parameter.grad = other


def step_merged(
    optimizer: torch.optim.Optimizer, scalers: Sequence[ScalerSteps] | ScalerSteps, *args: Any, **kwargs: Any
) -> Any:
    """Step once with gradients that several scalers have merged, if all of them were finite.

    Call each scaler's `update` afterwards: its scale moves by what its own loss gave. The host reads the verdicts once,
    or not at all with an optimizer that decides by itself.

    Args:
        optimizer: The one that was given to each `GradScaler.merge`.
        scalers: The scalers; disabled ones are passed over.
        args: For the optimizer's ``step``; no closure.
        kwargs: Likewise.

    Returns:
        What the optimizer's ``step`` returns, None if it was skipped or had no gradients.

    Raises:
        ScalerProtocolError: A scaler has not merged anything for this optimizer since its last `update`.

    Example:
        See `GradScaler.merge`.
    """
    scalers = _checked(scalers)
    enabled = [scaler for scaler in scalers if scaler._enabled]
    if not enabled:
        return optimizer.step(*args, **kwargs)
    states = [_merged_state(scaler, optimizer, index) for index, scaler in enumerate(enabled)]
    for scaler, state in zip(enabled, states, strict=True):
        scaler._agree(optimizer, state)
    flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
    if not flags:
        for scaler in enabled:
            scaler._without_gradients(optimizer)
        return None
    found = add_up(flags, flags[0].device)
    if contract.decides_itself(optimizer) and not contract.takes_scaler(optimizer):
        values = {"grad_scale": getattr(optimizer, "grad_scale", None), "found_inf": found}
        contract.give_momentum(optimizer)
        with contract.attributes(optimizer, values):
            result = optimizer.step(*args, **kwargs)
        _end(enabled, states, optimizer, None)
        return result
    each = torch.stack(
        [add_up(list(state["found_inf_per_device"].values()) or [found * 0], found.device) for state in states]
    )
    verdicts = [flag > 0 for flag in each.tolist()]
    result = None if any(verdicts) else optimizer.step(*args, **kwargs)
    _end(enabled, states, optimizer, verdicts)
    return result


def _checked(scalers: Any) -> list[Any]:
    listed = [scalers] if isinstance(scalers, torch.amp.GradScaler) else list(scalers)
    wrong = [one for one in listed if not hasattr(one, "_begin_step")]
    if wrong or not listed:
        got = f"a {type(wrong[0]).__name__} of {type(wrong[0]).__module__}" if wrong else "none"
        msg = (
            f"step_merged() takes the optimizer, and the mezzo.torch.GradScalers that have merged gradients; got {got}."
        )
        raise ScalerProtocolError(msg)
    return listed


def _merged_state(scaler: ScalerSteps, optimizer: torch.optim.Optimizer, index: int) -> dict[str, Any]:
    state = scaler._begin_step(optimizer, scaled=False)
    if state["stage"] is not UNSCALED:
        msg = (
            f"Scaler {index} of step_merged() has merged no gradients for this optimizer since its last update(). Run its "
            "loss's backward pass in `with scaler.merge(optimizer):`."
        )
        raise ScalerProtocolError(msg)
    return state


def _end(
    scalers: Sequence[ScalerSteps],
    states: Sequence[dict[str, Any]],
    optimizer: torch.optim.Optimizer,
    verdicts: list[bool] | None,
) -> None:
    """Tell each scaler: its own loss's verdict moves its scale, and all of them decide whether the step was made."""
    # If nobody has touched the sum since the last loss was added to it, what is not finite in it can be named.
    intact = any(are_same(state.get("sum", []), versions_of(optimizer, most=1)) for state in states)
    errors = []
    for at, (scaler, state) in enumerate(zip(scalers, states, strict=True)):
        others = [other for other in states if other is not state]
        state["others"] = [flag for other in others for flag in other["found_inf_per_device"].values()]
        state["merged"] = intact
        if verdicts is not None:
            state["skipped"], state["not_made"] = verdicts[at], any(verdicts)
        try:
            scaler._end_step(optimizer, state)
        except SkippedStepsError as error:
            errors.append(error)
    if errors:
        raise errors[0]
