"""What a `GradScaler` does in `unscale_` and `step`: gradients divided and looked at, steps made or skipped."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import ScalerProtocolError
from mezzo.torch import contract
from mezzo.torch.agreement import agree_, has_partial, meshes
from mezzo.torch.eager import runs_eagerly, runs_itself_eagerly
from mezzo.torch.gradients import are_same, collect, each_parameter_of, parameters_of, versions_of
from mezzo.torch.history import Steps
from mezzo.torch.nonfinite import Counts, count
from mezzo.torch.open_gradients import OpenGradients
from mezzo.torch.scaler_iterations import Iterations
from mezzo.torch.scaler_verdicts import SCALED, STEPPED, UNSCALED
from mezzo.torch.updating import add_up

__all__ = ["ScalerSteps"]


class ScalerSteps(Iterations):
    """A scaler's steps."""

    def _start(self) -> None:
        self._open = OpenGradients(self._open_parameters, self._scale_or_one, self._unscale_again)
        # What `scale` gives out while a closure runs.
        self._listen: list[Tensor] | None = None
        super()._start()
        self._of_this_run |= {"_open", "_listen"}

    def _scale_or_one(self) -> Tensor:
        return torch.ones(()) if self._scale is None else self._scale

    def _saw_scaled(self, scaled: Tensor) -> None:
        if self._listen is not None:
            self._listen.append(scaled)
        if self._nan_rule.matters(self._health):
            self._nan_rule.look_at(scaled)
        unscaled = any(state["stage"] is UNSCALED for state in self._per_optimizer_states.values())
        self._open.scaled(scaled, watch=unscaled or bool(self._left))

    # Unscaling

    def _unscale(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        scale, _ = self._check_scale_growth_tracker("unscale_")
        self._notice_other_hands(scale)
        found = torch.zeros((), dtype=torch.float32, device=scale.device)
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inverse_of(scale), found, True)
        state["stage"] = UNSCALED
        self._look_closer(optimizer, state)

    def _look_closer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Tell NaN from Inf while gradients are as they came: at once if the last iteration failed, else a step may yet."""
        state["counts"] = state["flags"] = None
        state["agreed"] = False
        state["probe"] = versions_of(optimizer, most=1)
        if self._health.skips:
            state["counts"] = count(parameters_of(optimizer))
            state["flags"] = _flags_of(state["counts"], self._scale_or_one().device)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,  # noqa: ARG002 - PyTorch's signature
    ) -> dict[torch.device, Tensor]:
        """Divide and look; PyTorch's name and arguments, for subclasses. Gradients may be float16 in any case."""
        factors = self._other_factors(optimizer, inv_scale)
        return self._unscale_those(parameters_of(optimizer), factors, inv_scale, found_inf)

    def _unscale_those(
        self, parameters: list[Tensor], factors: dict[int, Tensor], inverse: Tensor, found: Tensor
    ) -> dict[torch.device, Tensor]:
        with torch.no_grad():
            gradients = collect(parameters, factors)
            look_again = self._health.at_least < 1.0 or _is_capturing(found.device)
            return gradients.unscale_(inverse, found, look_again=look_again)

    def _other_factors(self, optimizer: torch.optim.Optimizer, inverse: Tensor) -> dict[int, Tensor]:
        """Find the parameters whose gradients were unscaled for another optimizer, or before the last update.

        Returns:
            From their ids to what their gradients are to be multiplied by: 1, or where only the device knows, by what
            it knows.
        """
        left = [one for other, some in self._left if other is optimizer and _intact(some) for one, _, _ in some]
        others = [state for state in self._per_optimizer_states.values() if state["stage"] is not SCALED]
        if not left and not others:
            return {}
        one = torch.ones_like(inverse)
        factors = {id(parameter): one for parameter in left}
        mine = {id(parameter) for parameter in parameters_of(optimizer)}
        for state in others:
            other = state.get("optimizer")
            if other is None or other is optimizer or state.get("merging"):
                continue
            shared = mine & {id(parameter) for parameter in parameters_of(other)}
            if shared:
                factors.update(dict.fromkeys(shared, _left_by(other, state, inverse, one, len(shared))))
        return factors

    def _unscaled_ids(self) -> set[int]:
        """Ids of the parameters whose gradients are unscaled now, as far as is known."""
        ids = {id(one) for _, left in self._left if _intact(left) for one, _, _ in left}
        for state in self._per_optimizer_states.values():
            if state["stage"] is not SCALED and not state.get("by_contract"):
                ids.update(map(id, parameters_of(state["optimizer"])))
        return ids

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Look without dividing, for an optimizer that divides by itself; PyTorch's name, which optimizers call."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._state_of(optimizer)
        one, found = torch.ones((), device=scale.device), torch.zeros((), device=scale.device)
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, one, found, True)
        self._look_closer(optimizer, state)
        return state["found_inf_per_device"]  # type: ignore[no-any-return]

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]  # type: ignore[no-any-return]

    def _refuse_unseen(self, state: dict[str, Any]) -> None:
        if self._scaled_unseen and not state.get("scaled_unseen"):
            msg = (
                "unscale_() has already been called on this optimizer since the last update(), and compiled code has called "
                "scale() since: whether the gradients are scaled now is not known. Call unscale_() once, after the last "
                "backward pass."
            )
            raise ScalerProtocolError(msg)

    @contextmanager
    def _only_clipping(self) -> Iterator[None]:
        """Let the region write to gradients that are finite: those that are not can still be told apart afterwards."""
        untouched = [
            state
            for state in self._per_optimizer_states.values()
            if state["stage"] is UNSCALED and are_same(state.get("probe", []), versions_of(state["optimizer"], most=1))
        ]
        yield
        for state in untouched:
            state["probe"] = versions_of(state["optimizer"], most=1)

    # Gradients that come after unscale_

    def _open_parameters(self) -> list[Tensor]:
        for optimizer, left in self._left:
            state = self._state_of(optimizer)
            if state["stage"] is SCALED and _intact(left):
                state["stage"] = UNSCALED
        self._left = []
        return [
            parameter
            for state in self._per_optimizer_states.values()
            if state["stage"] is UNSCALED and not state.get("merging")
            for parameter in parameters_of(state["optimizer"])
        ]

    @torch.no_grad()
    def _unscale_again(self, parameters: Iterable[Tensor]) -> None:
        scale, _ = self._check_scale_growth_tracker("unscale_")
        scaled = {id(one) for one in parameters}
        inverse = inverse_of(scale)
        for state in self._per_optimizer_states.values():
            if state["stage"] is not UNSCALED or state.get("merging"):
                continue
            optimizer = state["optimizer"]
            mine = {id(one) for one in parameters_of(optimizer)}
            if not mine & scaled and state["found_inf_per_device"]:
                continue
            given_up = [*state.get("given_up", ()), *state["found_inf_per_device"].values()]
            state["given_up"] = [add_up(given_up, scale.device)] if given_up else []
            found = torch.zeros((), dtype=torch.float32, device=scale.device)
            flags = self._unscale_those(
                parameters_of(optimizer), dict.fromkeys(mine - scaled, torch.ones_like(inverse)), inverse, found
            )
            state["found_inf_per_device"] = flags
            self._look_closer(optimizer, state)
            scaled -= mine

    # Steps

    def _has_new_gradients(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> bool:
        """Say whether gradients were put there by hand, when there were none to unscale."""
        if state["found_inf_per_device"] or state.get("merging"):
            return False
        return any(one.grad is not None for one in each_parameter_of(optimizer))

    @runs_eagerly
    def _begin_step(self, optimizer: torch.optim.Optimizer, *, scaled: bool = True) -> dict[str, Any]:
        if scaled:
            self._begin("step")
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
            state["skipped"] = any(flag.tolist() for flag in own)
            state["not_made"] = bool(found.tolist())
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
            state["flags"] = flags = _flags_of(None if changed else counts, self._scale_or_one().device)
            # All ranks are here, since all skip.
            agree_(flags, meshes(parameters_of(optimizer)), self._process_group)
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

    def _has_to_be_unscaled(self, optimizer: torch.optim.Optimizer, scale: Tensor) -> bool:
        """Say whether an optimizer that would unscale by itself cannot know enough to do so.

        It does not look at its quotients, which can be infinite where the scale is below 1; nor which of its gradients are
        unscaled already; and it would add up parts of a sum that are still scaled.
        """
        return (
            self._health.at_least < 1.0
            or _is_capturing(scale.device)
            or bool(self._other_factors(optimizer, scale))
            or has_partial(parameters_of(optimizer))
        )

    @runs_eagerly
    def _contract_values(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Tensor | None] | None:
        scale, _ = self._check_scale_growth_tracker("step")
        self._notice_other_hands(scale)
        if state["stage"] is SCALED:
            if self._has_to_be_unscaled(optimizer, scale):
                self._unscale(optimizer, state)
            else:
                self._check_inf_per_device(optimizer)
                state["by_contract"] = True
        self._agree(optimizer, state)
        flags = list(state["found_inf_per_device"].values())
        if not flags:
            return None
        divisor = preset = getattr(optimizer, "grad_scale", None)
        if state["stage"] is SCALED:
            divisor = scale * (1 if preset is None else preset)
        return {"grad_scale": divisor, "found_inf": add_up(flags, scale.device)}


def inverse_of(scale: Tensor) -> Tensor:
    """Give one over the scale, in float32."""
    # In float64, as PyTorch: a float32 division may be inexact on some devices. Apple's have no float64.
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def _flags_of(counts: Counts | None, device: torch.device) -> Tensor:
    """Any NaN, any Inf, and whether neither is known, as `Health.learn` takes them."""
    if counts is None:
        return torch.tensor([0.0, 0.0, 1.0], device=device)
    return torch.cat([counts.flags(device), torch.zeros(1, device=device)])


def _is_capturing(device: torch.device) -> bool:
    """Say whether a CUDA graph is being captured: it will run again with scales that nobody knows now."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _intact(left: list[tuple[Tensor, Tensor, int]]) -> bool:
    """Say whether the gradients that were left unscaled are the same, and nobody has written to them."""
    return all(one.grad is gradient and gradient._version == version for one, gradient, version in left)


def _left_by(other: torch.optim.Optimizer, state: dict[str, Any], inverse: Tensor, one: Tensor, shared: int) -> Tensor:
    """Say what is left to multiply gradients by, after another optimizer has unscaled them."""
    if not state.get("by_contract"):
        return one
    if type(other).__module__.startswith("torch.optim."):
        # PyTorch's fused optimizers write the unscaled gradients back, unless they skip.
        skipped = add_up(list(state["found_inf_per_device"].values()), inverse.device) > 0
        return torch.where(skipped, inverse, one)
    msg = (
        f"{shared} parameter(s) belong to an optimizer of type {type(other).__name__} too, which was stepped before and "
        "unscales by itself, so whether their gradients are scaled now is not known. Call unscale_() of both optimizers "
        "before the first step()."
    )
    raise ScalerProtocolError(msg)
