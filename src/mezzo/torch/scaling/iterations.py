"""How the verdicts of an iteration move the scale: `GradScaler.update`."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mezzo.errors import ScalerProtocolError, ScalingError
from mezzo.scaling import LossScaling

from .gradients import parameters_of, version_of
from .health import LAG
from .nonfinite import Overflow, reference_to
from .overflow_explaining import OverflowExplainer
from .updating import Rule, add_up, guarded_update_, set_scale_, update_
from .verdicts import STEPPED, UNSCALED, Left, Verdicts, fresh_state

__all__ = ["Iterations"]

_log = logging.getLogger("mezzo.torch.scaler")


class Iterations(Verdicts):
    """A scaler's iterations, without the steps in them."""

    def _begin_update(self) -> None:
        self._begin("update")
        self._open.settle()
        for history in self._watched_by:
            history._take_scale(self._check_scale_growth_tracker("update")[0])

    def _move_scale(self) -> None:
        scale, tracker = self._check_scale_growth_tracker("update")
        for state in self._per_optimizer_states.values():
            if state["stage"] is UNSCALED and state.get("optimizer") is not None:
                self._agree(state["optimizer"], state)
        verdicts = [
            flag for state in self._per_optimizer_states.values() for flag in state["found_inf_per_device"].values()
        ]
        verdicts += [flag for state in self._per_optimizer_states.values() for flag in state.get("given_up", ())]
        if self._holds:
            if verdicts:
                self._held.append(add_up(verdicts, scale.device))
            return
        verdicts += self._held
        if not verdicts:
            if self._strict:
                msg = "No inf checks were recorded prior to update. Call scaler.step(optimizer) before update()."
                raise ScalerProtocolError(msg)
            return
        self._notice_other_hands(scale)
        found = add_up(verdicts, scale.device)
        known = self._known_verdict()
        flags = self._flags_of_iteration(scale.device)
        if known is not None:
            self._learn(found=known, flags=flags)
        self._move(scale, tracker, found, known, flags)
        self._held.clear()
        self._nan_rule.end_iteration(failed=known)

    def _move(self, scale: Tensor, tracker: Tensor, found: Tensor, known: bool | None, flags: Tensor | None) -> None:
        hold = self._nan_rule.hold(
            self._health,
            known=known,
            found=found,
            flags=flags,
            agree_=self._agree_on,
            overflows=lambda: [steps.overflow for _, steps in self._history.all() if steps.overflow is not None],
        )
        factor, interval = self._backoff_factor, min(self._growth_interval, 2**31 - 1)
        if hold is None and self._max_scale is None and self._health.at_least * factor > self._min_scale:
            update_(scale, tracker, found, self._growth_factor, factor, interval)
        else:
            rule = Rule(self._growth_factor, factor, interval, self._min_scale, self._max_scale)
            guarded_update_(scale, tracker, found, rule, hold)
        self._moved = (scale, scale._version)
        if known is not False:
            self._health.fell(factor)
        if known is None or self._health.at_least < 1.0:
            self._health.send(found, flags, scale, learn=known is None)
        late = self._health.look(0 if scale.device.type == "cpu" else LAG)
        if late and self._on_overflow is not None:
            self._call_back_late(self._on_overflow)

    def _set_scale(self, new_scale: float | Tensor) -> None:
        scale, _ = self._check_scale_growth_tracker("update")
        if isinstance(new_scale, Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad or new_scale.is_meta:
                msg = (
                    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
                    f"requires_grad=False. Got a tensor of shape {tuple(new_scale.shape)} with requires_grad="
                    f"{new_scale.requires_grad} on {new_scale.device}."
                )
                raise ScalingError(msg)
            if new_scale.device.type != "cpu":
                set_scale_(scale, new_scale)
                self._scale_was_set(None)
                return
        try:
            number = LossScaling(init_scale=new_scale).start().scale  # type: ignore[arg-type]
        except ScalingError as error:
            raise ScalingError(str(error).replace("init_scale", "new_scale")) from None
        scale.fill_(number)
        self._scale_was_set(number)

    def _call_back_late(self, on_overflow: Callable[[Overflow], object]) -> None:
        for optimizer, steps in self._history.all():
            if steps.unread:
                why = f"the device decided on the step, and the host hears of it {LAG} iterations later"
                on_overflow(self._overflow(optimizer, self._health.skips, None, why))

    def _known_verdict(self) -> bool | None:
        """Say whether the iteration was skipped, or None if the host does not know."""
        if self._held:
            return None
        skipped = []
        for state in self._per_optimizer_states.values():
            skipped += [state.get("skipped"), state.get("gave_up") if state.get("given_up") else False]
        return None if None in skipped else any(skipped)

    def _flags_of_iteration(self, device: torch.device) -> Tensor | None:
        """Bring together what is known of NaN and Inf: three flags, as `Health.learn` takes them; None if nothing is."""
        states = self._per_optimizer_states.values()
        flags = [state["flags"] for state in states if state.get("flags") is not None]
        if not flags or self._held:
            return None
        together = torch.stack([each.to(device, non_blocking=True) for each in flags]).amax(0)
        given_up = [flag for state in states for flag in state.get("given_up", ())]
        if given_up:
            # Nobody told NaN from Inf in those.
            together[2] = torch.maximum(together[2], add_up(given_up, device))
        return together

    def _learn(self, *, found: bool, flags: Tensor | None) -> None:
        health = self._health
        if not found and health.skips and not health.settled:
            _log.info(
                "The first %d step(s) were skipped while the scale was looked for, from %g down to %g. This is normal.",
                health.skips,
                self._init_scale,
                self._init_scale * self._backoff_factor**health.skips,
            )
        health.learn(found=found, flags=flags)

    def _end_iteration(self) -> None:
        for history in self._watched_by:
            history._take_iteration(self._per_optimizer_states.values())
        self._left = [
            (state["optimizer"], left)
            for state in self._per_optimizer_states.values()
            if state["stage"] is UNSCALED
            and state.get("optimizer") is not None
            and (left := _left_of(state["optimizer"]))
        ]
        self._stepped_last = [
            reference_to(state["optimizer"])
            for state in self._per_optimizer_states.values()
            if state["stage"] is STEPPED and state.get("optimizer") is not None
        ]
        self._scaled_now = self._scaled_unseen = False
        self._open.closed()
        self._per_optimizer_states = defaultdict(fresh_state)
        # At the very end: a callback that raises leaves a scaler that can go on.
        for history in self._watched_by:
            history._tell_if_due()
        if isinstance(self._on_overflow, OverflowExplainer):
            self._on_overflow.iteration_begins()

    @contextmanager
    def _holding(self) -> Iterator[None]:
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1


def _left_of(optimizer: torch.optim.Optimizer) -> Left:
    return [(one, one.grad, version_of(one.grad)) for one in parameters_of(optimizer) if one.grad is not None]
