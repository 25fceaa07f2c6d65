"""What a `GradScaler` does in `unscale_`: which gradients are still scaled, and how they come to be unscaled, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import ScalerProtocolError

from .gradients import (
    Gradients,
    are_same,
    collect,
    each_parameter_of,
    parameters_of,
    version_of,
    versions_of,
)
from .health import unknown_flags
from .iterations import Iterations
from .nonfinite import Counts, count
from .open_gradients import OpenGradients
from .updating import add_up
from .verdicts import SCALED, STEPPED, UNSCALED

__all__ = ["Unscaling", "flags_of", "inverse_of", "is_capturing"]


class Unscaling(Iterations):
    """A scaler's look at gradients."""

    def _start(self) -> None:
        self._open = OpenGradients(self)
        # What `scale` gives out while a closure runs.
        self._listen: list[Tensor] | None = None
        # The gradients that were unscaled last, until the state of their optimizer has them.
        self._looked_at: Gradients | None = None
        super()._start()
        self._of_this_run |= {"_open", "_listen", "_looked_at"}

    def _scale_or_one(self) -> Tensor:
        return torch.ones(()) if self._scale is None else self._scale

    def _saw_scaled(self, scaled: Tensor) -> None:
        if self._listen is not None:
            self._listen.append(scaled)
        if self._nan_rule.matters(self._health):
            self._nan_rule.look_at(scaled)
        begun = any(state["stage"] is not SCALED for state in self._per_optimizer_states.values())
        self._open.scaled(scaled, watch=begun or bool(self._left))

    def _unscale(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        scale, _ = self._check_scale_growth_tracker("unscale_")
        self._notice_other_hands(scale)
        found = torch.zeros((), dtype=torch.float32, device=scale.device)
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inverse_of(scale), found, True)
        state["stage"], state["by_contract"] = UNSCALED, False
        self._look_closer(optimizer, state)

    def _look_closer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Tell NaN from Inf while gradients are as they came: at once if the last iteration failed, else a step may yet."""
        state["record"], self._looked_at = self._looked_at, None
        state["counts"] = state["flags"] = None
        state["agreed"] = False
        state["probe"] = versions_of(optimizer, most=1)
        if self._listen is not None:
            state["versions"] = versions_of(optimizer)
        if self._health.skips:
            state["counts"] = count(parameters_of(optimizer))
            state["flags"] = flags_of(state["counts"], self._scale_or_one().device)

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
            self._looked_at = gradients = collect(parameters, factors)
            look_again = self._health.at_least < 1.0 or is_capturing(found.device)
            return gradients.unscale_(inverse, found, look_again=look_again)

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

    def _refuse_unseen(self) -> None:
        if self._scaled_unseen:
            msg = (
                "unscale_() has already been called on this optimizer since the last update(), and compiled code has called "
                "scale(): whether the gradients are scaled now is not known. Call unscale_() once, after the last backward "
                "pass."
            )
            raise ScalerProtocolError(msg)

    def _has_new_gradients(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> bool:
        """Say whether gradients were put there by hand, when there were none to unscale."""
        if state["found_inf_per_device"] or state.get("merging"):
            return False
        return any(one.grad is not None for one in each_parameter_of(optimizer))

    # Which gradients are unscaled

    def _other_factors(self, optimizer: torch.optim.Optimizer, inverse: Tensor) -> dict[int, Tensor]:
        """Find the parameters whose gradients were unscaled for another optimizer in this iteration.

        Returns:
            From their ids to what their gradients are to be multiplied by: 1, or where only the device knows, by what
            it knows.
        """
        states = [state for state in self._per_optimizer_states.values() if state["stage"] is not SCALED]
        if not states:
            return {}
        mine = {id(one): one for one in each_parameter_of(optimizer) if one.grad is not None}
        one = torch.ones_like(inverse)
        factors: dict[int, Tensor] = {}
        for state in states:
            other = state.get("optimizer")
            if other is None or other is optimizer or state.get("merging"):
                continue
            theirs = [mine[id(each)] for each in each_parameter_of(other) if id(each) in mine]
            shared = [id(each) for each in theirs if _is_recorded(each, state)] if theirs else []
            if shared:
                factors.update(dict.fromkeys(shared, _left_by(other, state, inverse, one, len(shared))))
        return factors

    def _are_unscaled(self, parameters: list[Tensor]) -> list[bool]:
        """Say of each parameter whether its gradient is unscaled now, as far as is known."""
        if self._scale is None:
            return [True] * len(parameters)
        open_ids = {id(each[0]) for _, left in self._left for each in left if _intact([each])}
        if not self._scaled_now:
            # Others accumulate for longer, and are not stepped at each update.
            stepped_last = [optimizer for get in self._stepped_last if (optimizer := get()) is not None]
            open_ids.update(id(one) for optimizer in stepped_last for one in each_parameter_of(optimizer))
        stepped: list[dict[str, Any]] = []
        for state in self._per_optimizer_states.values():
            if state.get("by_contract") or state.get("optimizer") is None:
                continue
            if state["stage"] is UNSCALED:
                open_ids.update(map(id, each_parameter_of(state["optimizer"])))
            elif state["stage"] is STEPPED:
                stepped.append(state)
        return [id(one) in open_ids or any(_is_recorded(one, state) for state in stepped) for one in parameters]

    @contextmanager
    def _only_clipping(self) -> Iterator[None]:
        """Let the region write to gradients that are finite: those that are not can still be told apart afterwards."""
        untouched = [
            state
            for state in self._per_optimizer_states.values()
            if state["stage"] is UNSCALED
            and state.get("optimizer") is not None
            and are_same(state.get("probe", []), versions_of(state["optimizer"], most=1))
        ]
        yield
        for state in untouched:
            state["probe"] = versions_of(state["optimizer"], most=1)

    # Gradients that come after unscale_

    def _open_parameters(self, is_reached: Callable[[Tensor], bool]) -> list[Tensor]:
        """List the parameters whose gradients are unscaled and stay so, when a scaled backward pass begins.

        Gradients that were stepped with do not: they are consumed, and what is added is scaled, as in PyTorch.
        """
        still_left = []
        for optimizer, left in self._left:
            state = self._state_of(optimizer)
            if state["stage"] is SCALED and _intact(left) and any(is_reached(one) for one, _, _ in left):
                state["stage"] = UNSCALED
            elif state["stage"] is SCALED:
                still_left.append((optimizer, left))
        self._left = still_left
        found = []
        for state in self._per_optimizer_states.values():
            known = state.get("optimizer")
            if known is None or state.get("merging"):
                continue
            if state["stage"] is UNSCALED:
                found += parameters_of(known)
            elif state["stage"] is STEPPED and self._may_be_shared(known):
                touched = {id(one) for one in each_parameter_of(known) if is_reached(one)}
                state.setdefault("touched", set()).update(touched)
        return found

    def _may_be_shared(self, optimizer: torch.optim.Optimizer) -> bool:
        others = [other for other, _ in self._history.all() if other is not optimizer]
        mine = set(map(id, each_parameter_of(optimizer)))
        return not others or any(id(one) in mine for other in others for one in each_parameter_of(other))

    @torch.no_grad()
    def _unscale_again_for(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Look at an optimizer's gradients, all of which are unscaled, once more."""
        scale, _ = self._check_scale_growth_tracker("unscale_")
        one, found = torch.ones((), device=scale.device), torch.zeros((), device=scale.device)
        state["found_inf_per_device"] = self._unscale_those(parameters_of(optimizer), {}, one, found)
        self._look_closer(optimizer, state)

    @torch.no_grad()
    def _unscale_again(self, parameters: Iterable[Tensor]) -> None:
        scale, _ = self._check_scale_growth_tracker("unscale_")
        scaled = {id(one) for one in parameters}
        inverse = inverse_of(scale)
        for state in self._per_optimizer_states.values():
            optimizer = state.get("optimizer")
            if optimizer is None or state["stage"] is not UNSCALED or state.get("merging"):
                continue
            mine = {id(one) for one in each_parameter_of(optimizer)}
            if not mine & scaled and state["found_inf_per_device"]:
                continue
            given_up = [*state.get("given_up", ()), *state["found_inf_per_device"].values()]
            state["given_up"] = [add_up(given_up, scale.device)] if given_up else []
            found = torch.zeros((), dtype=torch.float32, device=scale.device)
            ones = dict.fromkeys(mine - scaled, torch.ones_like(inverse))
            state["found_inf_per_device"] = self._unscale_those(parameters_of(optimizer), ones, inverse, found)
            self._look_closer(optimizer, state)
            scaled -= mine


def inverse_of(scale: Tensor) -> Tensor:
    """Give one over the scale, in float32."""
    # In float64, as PyTorch: a float32 division may be inexact on some devices. Apple's have no float64.
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def flags_of(counts: Counts | None, device: torch.device) -> Tensor:
    """Any NaN, any Inf, and whether neither is known, as `Health.learn` takes them."""
    if counts is None:
        return unknown_flags(device)
    return torch.cat([counts.flags(device), torch.zeros(1, device=device)])


def is_capturing(device: torch.device) -> bool:
    """Say whether a CUDA graph is being captured: it will run again with scales that nobody knows now."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _intact(left: list[tuple[Tensor, Tensor, int]]) -> bool:
    """Say whether the gradients that were left unscaled are the same, and nobody has written to them."""
    return all(one.grad is gradient and version_of(gradient) == version for one, gradient, version in left)


def _is_recorded(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Say whether a parameter's gradient is the one that was unscaled for an optimizer, and nothing was added since."""
    record: Gradients | None = state.get("record")
    if parameter.grad is None or id(parameter) in state.get("touched", ()):
        return False
    # Without a record, a subclass has unscaled by itself.
    return record is None or id(parameter.grad) in record.ids()


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
