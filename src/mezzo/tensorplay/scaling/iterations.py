"""What a `GradScaler` knows of an iteration: gradients that are unscaled, verdicts, and how these move the scale."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import tensorplay
from tensorplay import Tensor
from tensorplay.amp.grad_scaler import OptState

from mezzo.errors import ScalerProtocolError, ScalingError
from mezzo.scaling import Verdict

from .gradients import Gradients, is_same, parameters_of
from .reports import NonFinite, Reports, describe

__all__ = ["SCALED", "STEPPED", "UNSCALED", "Iterations", "Turn"]

SCALED, UNSCALED, STEPPED = OptState.READY, OptState.UNSCALED, OptState.STEPPED
"""The stages of an optimizer in an iteration, under TensorPlay's enumeration."""

_log = logging.getLogger("mezzo.tensorplay.scaler")


@dataclass
class Turn:
    """An optimizer's part in one iteration.

    Attributes:
        optimizer: The optimizer; held, so that its id means one optimizer.
        stage: What was done with its gradients.
        found: What they were; None if nobody looked or there were none.
        nonfinite: Those that were not finite.
        calls: How often `scale` had been called when they were unscaled.
        places: Where they were then, for each parameter.
        by_contract: Whether the optimizer is to divide them itself.
    """

    optimizer: Any
    stage: OptState = SCALED
    found: Verdict | None = None
    nonfinite: tuple[NonFinite, ...] = ()
    calls: int = 0
    places: dict[int, Tensor] | None = None
    by_contract: bool = False


class Iterations(Reports):
    """A scaler's iterations, without the steps in them."""

    def _start(self) -> None:
        super()._start()
        self._turns: dict[int, Turn] = {}
        # Where gradients are that were unscaled in this iteration, from the ids of their parameters.
        self._unscaled: dict[int, Tensor] = {}
        # How often `scale` was called in this iteration, and what it gave out while a closure runs.
        self._calls = 0
        self._heard: list[Tensor] | None = None
        # Whether it was said of this run of NaN that the scale stays.
        self._warned = False

    def _turn_of(self, optimizer: Any) -> Turn:
        if not hasattr(optimizer, "param_groups"):
            msg = f"Got {optimizer!r:.80} of type {type(optimizer).__name__} for an optimizer, which has param_groups."
            raise ScalerProtocolError(msg)
        return self._turns.setdefault(id(optimizer), Turn(optimizer))

    # Unscaling

    def _unscale(self, turn: Turn) -> None:
        """Divide the gradients of an optimizer, but those that were divided before, and look at all of them."""
        gradients = Gradients(turn.optimizer)
        self._refuse_float16(turn.optimizer, gradients)
        gradients.multiply_(1.0 / self._state.scale, but=gradients.shared_with(self._unscaled))
        self._look(turn, gradients)
        turn.stage, turn.by_contract = UNSCALED, False
        turn.calls, turn.places = self._calls, gradients.places()
        self._unscaled.update(turn.places)

    def _look(self, turn: Turn, gradients: Gradients) -> None:
        """Say what gradients are; NaN and Inf are told apart where a first look found anything."""
        turn.nonfinite = () if gradients.look_finite() else self._nonfinite_in(turn.optimizer, gradients)
        if not gradients:
            turn.found = None
        elif not turn.nonfinite:
            turn.found = Verdict.FINITE
        else:
            turn.found = Verdict.INF if any(one.inf for one in turn.nonfinite) else Verdict.NAN

    def _look_only(self, turn: Turn) -> None:
        """Look at scaled gradients that the optimizer is going to divide."""
        gradients = Gradients(turn.optimizer)
        shared = gradients.shared_with(self._unscaled)
        if shared:
            msg = (
                f"{len(shared)} parameter(s) of a {type(turn.optimizer).__name__} with float16 gradients, which divides "
                "them itself, belong to another optimizer too, which has divided them before. Give each parameter to "
                "one optimizer."
            )
            raise ScalerProtocolError(msg)
        self._look(turn, gradients)
        turn.by_contract = True

    def _refuse_float16(self, optimizer: Any, gradients: Gradients) -> None:
        found = gradients.of_dtype(tensorplay.float16)
        if not found:
            return
        names = self._names_in(optimizer)
        listed = ", ".join(names[id(one)] for one in found[:5]) + (", ..." if len(found) > 5 else "")
        msg = (
            f"Attempting to unscale FP16 gradients. {len(found)} parameter(s) of {type(optimizer).__name__} have them: "
            f"{listed}. A float16 gradient that is divided by the scale loses what the scale has kept. Keep parameters in "
            "float32 (no model.half()) and let autocast cast them, or use an optimizer that divides them itself, such as "
            "SGD with fused=True, without unscale_()."
        )
        raise ScalingError(msg)

    def _refuse_late(self, turn: Turn) -> None:
        """Gradients that a backward pass has added to those that are unscaled are of no use."""
        if turn.calls == self._calls or not turn.places:
            return
        now = Gradients(turn.optimizer).places()
        late = [key for key, values in now.items() if key not in turn.places or not is_same(values, turn.places[key])]
        if late:
            names = self._names_in(turn.optimizer)
            msg = (
                f"{len(late)} gradient(s), such as that of {names[late[0]]}, have come from a scaled loss after unscale_() "
                f"of {type(turn.optimizer).__name__}, and are not unscaled. Call unscale_() once, after the last backward "
                "pass of the iteration; and update() before the next iteration."
            )
            raise ScalerProtocolError(msg)

    # Moving the scale

    def _move_scale(self) -> None:
        turns = list(self._turns.values())
        if not turns:
            msg = (
                "No inf checks were recorded prior to update. Call scaler.step(optimizer), or unscale_, before update(); "
                "or set a scale with update(new_scale)."
            )
            raise ScalerProtocolError(msg)
        found = {turn.found for turn in turns} - {None}
        if not found:
            return  # no optimizer had a gradient, which `step` has said
        verdict = next(one for one in (Verdict.INF, Verdict.NAN, Verdict.FINITE) if one in found)
        if verdict is Verdict.NAN:
            self._tell_of_nan()
        elif verdict is Verdict.FINITE:
            self._warned = False
        self._move_to(self._numbers.next(self._state, verdict))

    def _tell_of_nan(self) -> None:
        limit = self._numbers.max_nan_backoffs
        if limit is None or self._state.nan_backoffs < limit or self._warned:
            return
        self._warned = True
        _log.warning(
            "Gradients have been NaN, with no Inf among them, and %d backoff(s) of the scale in a row have not helped. It "
            "stays at %g. Parameters: %s. If it lasts, look for a division by zero, a logarithm or root of a number that is "
            "not positive, or NaN in the data.",
            limit,
            self._state.scale,
            describe(one for turn in self._turns.values() for one in turn.nonfinite),
        )

    def _end_iteration(self) -> None:
        self._turns, self._unscaled, self._calls = {}, {}, 0

    def _without_gradients(self, turn: Turn) -> None:
        """Say why there is no step; once, until there are gradients again."""
        steps = self._steps_of(turn.optimizer)
        steps.made, steps.nonfinite = False, ()
        turn.stage = SCALED
        if steps.told:
            return
        steps.told = True
        parameters = parameters_of(turn.optimizer)
        able = sum(bool(one.requires_grad) for one in parameters)
        why = "the loss has no path to them" if able else "all of them are frozen (requires_grad=False)"
        _log.warning(
            "No step was made: %s has %d parameter(s), %d of which require gradients, and 0 have one. The scale stays. "
            "Either %s, or the optimizer was made from other parameters than the model has now, or zero_grad() came after "
            "backward(), or the graph was used up by an earlier backward(), after which TensorPlay adds nothing.",
            type(turn.optimizer).__name__,
            len(parameters),
            able,
            why,
        )
