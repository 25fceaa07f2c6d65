"""What a `GradScaler` does in `step`: steps made or skipped, and what is told of them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import ScalerProtocolError
from mezzo.torch.agreement import agree_, has_partial
from mezzo.torch.eager import runs_eagerly, runs_itself_eagerly
from mezzo.torch.scaling import contract

from .gradients import are_same, each_parameter_of, parameters_of, versions_of
from .history import Steps
from .nonfinite import count
from .overflow_explaining import OverflowExplainer
from .unscaling import Unscaling, flags_of, is_capturing
from .updating import add_up
from .verdicts import SCALED, STEPPED, UNSCALED

__all__ = ["ScalerSteps"]


class ScalerSteps(Unscaling):
    """A scaler's steps."""

    @runs_eagerly
    def _begin_step(self, optimizer: torch.optim.Optimizer, *, scaled: bool = True) -> dict[str, Any]:
        if scaled:
            self._begin("step")
        if isinstance(self._on_overflow, OverflowExplainer):
            self._on_overflow.step_begins()
        self._open.settle()
        state = self._state_of(optimizer)
        if state["stage"] is STEPPED:
            msg = (
                "step() has already been called since the last update(). Call update() once per iteration, after all "
                "steps."
            )
            raise ScalerProtocolError(msg)
        if state["stage"] is UNSCALED and self._has_new_gradients(optimizer, state):
            self._unscale(optimizer, state)
        if scaled or state.get("sum"):  # a closure has no gradients yet
            for history in self._watched_by:
                history._take_step(optimizer)
        return state

    @runs_itself_eagerly
    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Step if the gradients are finite; PyTorch's name and arguments, for subclasses."""
        if self._read_verdict(optimizer_state):
            return None
        return optimizer.step(*args, **kwargs)

    @runs_eagerly
    def _read_verdict(self, state: dict[str, Any]) -> bool:
        """The host read of a step: one per device that has gradients."""
        flags = list(state["found_inf_per_device"].values())
        if state.get("given_up"):
            found, given_up = torch.stack([add_up(flags, flags[0].device), *state["given_up"]]).tolist()
            state["skipped"], state["gave_up"] = found > 0, given_up > 0
        else:
            state["skipped"] = sum(flag.item() for flag in flags) > 0
        return bool(state["skipped"])

    @runs_eagerly
    def _end_step(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state["stage"] = STEPPED
        own = list(state["found_inf_per_device"].values())
        flags = [*own, *state.get("others", ())]
        if not flags:
            return
        found = add_up(flags, flags[0].device)
        if state.get("skipped") is None and found.device.type == "cpu":
            # Nothing to wait for on a CPU.
            state["not_made"] = bool(found.tolist())
            state["skipped"] = any(flag.tolist() for flag in own) if state.get("others") else state["not_made"]
        steps = self._history.of(optimizer)
        if state.get("skipped") is None:
            steps.decided_on_device(found)
            steps.probe = [(weakref.ref(gradient), version) for gradient, version in versions_of(optimizer, most=1)]
        elif not state.get("not_made", state["skipped"]):
            steps.made(found)
        else:
            in_a_row = steps.skipped(found)
            if state["skipped"]:
                self._tell_of_overflow(optimizer, state, steps, in_a_row)
            self._check_skipped(optimizer, in_a_row, steps.overflow)

    def _tell_of_overflow(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], steps: Steps, in_a_row: int
    ) -> None:
        changed = False
        if state.get("flags") is None:
            changed = not are_same(state.get("probe", []), versions_of(optimizer, most=1))
            state["counts"] = counts = count(parameters_of(optimizer))
            state["flags"] = flags = flags_of(None if changed else counts, self._scale_or_one().device)
            # All ranks are here, since all skip.
            agree_(flags, self._meshes_of(optimizer), self._process_group)
        changed = changed and not state.get("merged")
        steps.overflow = overflow = self._overflow(optimizer, in_a_row, state.get("counts"), changed=changed)
        if self._on_overflow is not None:
            self._on_overflow(overflow)

    @runs_eagerly
    def _without_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        del self._per_optimizer_states[id(optimizer)]
        self._history.of(optimizer).idle()
        if not self._strict:
            return
        parameters = parameters_of(optimizer)
        able = sum(one.requires_grad for one in parameters)
        why = "the loss has no path to them" if able else "all of them are frozen (requires_grad=False)"
        msg = (
            f"No inf checks were recorded for this optimizer. It has {len(parameters)} parameter(s), {able} of which "
            f"require gradients, and 0 have one: {why}, or the optimizer was made from other parameters than the model "
            "has now (before it was moved or replaced), or zero_grad() came after backward()."
        )
        raise ScalerProtocolError(msg)

    # Optimizers that decide by themselves

    @runs_itself_eagerly
    def _step_by_contract(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if contract.takes_scaler(optimizer):
            contract.warn_of_old_form()
            step: Any = optimizer.step
            result = step(*args, **kwargs, grad_scaler=self)
            self._agree(optimizer, state)
        else:
            values = self._contract_values(optimizer, state)
            if values is None:
                return self._without_gradients(optimizer)
            contract.give_momentum(optimizer)
            with contract.attributes(optimizer, values):
                result = optimizer.step(*args, **kwargs)
        self._end_step(optimizer, state)
        return result

    @runs_eagerly
    def _contract_values(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Tensor | None] | None:
        scale, _ = self._check_scale_growth_tracker("step")
        self._notice_other_hands(scale)
        if state["stage"] is SCALED:
            if self._health.at_least < 1.0 or is_capturing(scale.device) or self._other_factors(optimizer, scale):
                # It looks at no quotient, which can be infinite where the scale is below 1; nor does it know which of
                # its gradients are unscaled already.
                self._unscale(optimizer, state)
            else:
                self._check_inf_per_device(optimizer)
                state["by_contract"] = True
                record = state.get("record")
                if record is not None and record.originals and has_partial(each_parameter_of(optimizer)):
                    # It would add up parts of a sum that are still scaled.
                    self._unscale(optimizer, state)
        self._agree(optimizer, state)
        flags = list(state["found_inf_per_device"].values())
        if not flags:
            return None
        divisor = preset = getattr(optimizer, "grad_scale", None)
        if state["stage"] is SCALED:
            divisor = scale * (1 if preset is None else preset)
        return {"grad_scale": divisor, "found_inf": add_up(flags, scale.device)}
