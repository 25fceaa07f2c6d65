"""What a `GradScaler` keeps from one `scale` to the next `update`: of each optimizer, and of the run."""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from mezzo.errors import ScalerProtocolError, ScalingError, SkippedStepsError
from mezzo.torch.agreement import agree_, check_process_group, meshes
from mezzo.torch.eager import runs_eagerly

from .gradients import each_parameter_of
from .health import Health, unknown_flags
from .history import History
from .nan_rule import NanRule
from .nonfinite import Counts, Overflow
from .numbers import Numbers
from .open_gradients import OpenGradients
from .overflow_explaining import OverflowExplainer
from .updating import add_up

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .scale_history import ScaleHistory

__all__ = ["SCALED", "STEPPED", "UNSCALED", "Verdicts"]

SCALED, UNSCALED, STEPPED = OptState.READY, OptState.UNSCALED, OptState.STEPPED
"""The stages of an optimizer in an iteration, under PyTorch's enumeration, which others compare with."""

_log = logging.getLogger("mezzo.torch.scaler")
Left = list[tuple[Tensor, Tensor, int]]


def fresh_state() -> dict[str, Any]:
    """What is known of an optimizer at the start of an iteration; the first two entries are PyTorch's.

    The others: ``optimizer``; ``skipped``, whether its step was, None as long as the host does not know; ``counts`` and
    ``flags`` of gradients that were not finite; ``probe``, a gradient and its version when it was unscaled; ``given_up``,
    the verdict of gradients that were unscaled and then given up, and ``gave_up``, what the host read of it; ``agreed``,
    if all ranks have; ``merging``; ``by_contract``, if the optimizer was to unscale by itself.
    """
    return {"stage": SCALED, "found_inf_per_device": {}}


class Verdicts(Numbers):
    """What is known to a scaler."""

    _process_group: ProcessGroup | None
    _open: OpenGradients

    def __init__(
        self,
        device: str | torch.device,
        numbers: dict[str, Any],
        *,
        enabled: bool,
        max_skipped: int | None,
        process_group: ProcessGroup | None,
        strict: bool,
        on_overflow: Callable[[Overflow], object] | Literal["explain"] | None,
    ) -> None:
        super().__init__(device, numbers, enabled=enabled)
        self._max_skipped = _checked_max_skipped(max_skipped)
        self._process_group = check_process_group(process_group)
        self._strict = bool(strict)
        self._on_overflow = _checked_callback(on_overflow)
        self._start()

    def _start(self) -> None:
        """Know nothing of any run: what is set here is in no copy."""
        before = set(self.__dict__)
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(fresh_state)
        self._health = Health(self._init_scale)
        self._history = History()
        self._names: dict[str, weakref.ref[Tensor]] = {}
        # Which tensor the scale was, and its version, when it was last moved here.
        self._moved: tuple[Tensor, int] | None = None
        # Whether `scale` was called in this iteration, and whether by compiled code, which nobody watches.
        self._scaled_now = False
        self._scaled_unseen = False
        # Gradients that were unscaled and not stepped with before the last update.
        self._left: list[tuple[torch.optim.Optimizer, Left]] = []
        self._held: list[Tensor] = []
        self._holds = 0
        # The optimizers that were stepped before the last update: their gradients are unscaled until more come.
        self._stepped_last: list[Any] = []
        self._nan_rule = NanRule(self._max_nan_backoffs)
        self._watched_by: list[ScaleHistory] = []
        self._of_this_run = {"_of_this_run", *self.__dict__} - before

    def _state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if not hasattr(optimizer, "param_groups"):
            msg = f"Got {optimizer!r:.80} of type {type(optimizer).__name__} for an optimizer, which has param_groups."
            raise ScalerProtocolError(msg)
        state = self._per_optimizer_states[id(optimizer)]
        state["optimizer"] = optimizer  # held until the end of the iteration: an id is to mean one optimizer
        return state

    def _scale_was_set(self, scale: float | None) -> None:
        if scale is None:
            self._health.forget()
        else:
            self._health.know(scale)
        if self._scale is not None:
            self._moved = (self._scale, self._scale._version)

    def _was_loaded(self, tracker: int) -> None:
        # A tracker counts finite iterations: the run that was saved had made a step.
        self._health.settled = self._health.settled or tracker > 0
        self._held.clear()

    def _notice_other_hands(self, scale: Tensor) -> None:
        """Others write to ``_scale`` too; then nothing is known of it."""
        if self._moved is None:
            self._moved = (scale, 0)
        if self._moved[0] is not scale or self._moved[1] != scale._version:
            self._scale_was_set(None)

    def _begin(self, funcname: str) -> None:
        if self._scale is None and self._process_group is not None:
            # A rank without a loss, of a pipeline say: it takes part in what the others decide.
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        self._check_scale_growth_tracker(funcname)

    @runs_eagerly
    def _agree(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Bring the verdicts of all ranks together, once per optimizer and iteration, however often a rank has unscaled.

        Each rank brings the flags: not finite; not finite, but given up; and what `Health.learn` takes, if it matters.
        """
        where = self._meshes_of(optimizer)
        if state.get("agreed") or not (where or self._process_group is not None):
            return
        scale, _ = self._check_scale_growth_tracker("step")
        none = torch.zeros((), device=scale.device)
        flags = state["found_inf_per_device"]
        closer = state.get("flags")
        if closer is None:
            closer = unknown_flags(scale.device) if flags else torch.zeros(3, device=scale.device)
        found = add_up([none, *flags.values()], scale.device)
        given_up = add_up([none, *state.get("given_up", ())], scale.device)
        together = torch.cat([torch.stack([found, given_up]), closer])
        agree_(together, where, self._process_group)
        # A rank without gradients takes down what the others found.
        devices = list(flags) or [scale.device]
        state["found_inf_per_device"] = {device: together[0].to(device, non_blocking=True) for device in devices}
        state["given_up"] = [together[1]]
        state["flags"] = together[2:] if self._health.skips else state.get("flags")
        state["agreed"] = True

    def _agree_on(self, flag: Tensor) -> None:
        """Bring a flag to its maximum over the ranks of all optimizers of the iteration."""
        optimizers = [state["optimizer"] for state in self._per_optimizer_states.values() if "optimizer" in state]
        where = {mesh: None for optimizer in optimizers for mesh in self._meshes_of(optimizer)}
        agree_(flag, where, self._process_group)

    def _meshes_of(self, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
        """Give the meshes that an optimizer's parameters are on; looked for anew when it has other parameters."""
        steps = self._history.of(optimizer)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if steps.parameters != count:
            steps.parameters, steps.meshes = count, meshes(each_parameter_of(optimizer))
        return steps.meshes

    # What the host hears of late

    def _host_reads(self, scale: float) -> None:
        """The host is reading the device in any case: take in what there is to know."""
        if self._scale is not None:
            self._notice_other_hands(self._scale)
        self._health.know(scale)
        for optimizer, steps in self._history.all():
            if steps.unread:
                self._check_skipped(optimizer, steps.in_a_row(), None)

    def _check_skipped(self, optimizer: torch.optim.Optimizer, in_a_row: int, overflow: Overflow | None) -> None:
        if self._max_skipped is None or in_a_row < self._max_skipped:
            return
        named = "not known; the device decided on the step" if overflow is None else overflow.describe()
        msg = (
            f"{in_a_row} steps of {type(optimizer).__name__} in a row were skipped (max_skipped={self._max_skipped}), for "
            f"gradients that are not finite. Parameters: {named}. If the loss is finite, lower init_scale or raise "
            "max_skipped; if it is not, look for the op that breaks it. To go on, call update() first."
        )
        raise SkippedStepsError(msg)

    def _overflow(
        self,
        optimizer: torch.optim.Optimizer,
        in_a_row: int,
        counts: Counts | None,
        why_unknown: str = "",
        *,
        changed: bool = False,
    ) -> Overflow:
        scale, _ = self._check_scale_growth_tracker("step")
        names = {id(parameter): name for name, get in self._names.items() if (parameter := get()) is not None}
        return Overflow(optimizer, scale.clone(), in_a_row, counts, names, why_unknown, changed=changed)

    # Copies

    def _state_to_keep(self) -> dict[str, Any]:
        if self._enabled and (self._per_optimizer_states or self._held or self._holds):
            msg = (
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update()."
            )
            raise ScalerProtocolError(msg)
        state = {name: value for name, value in self.__dict__.items() if name not in self._of_this_run}
        if self._enabled and self._scale is not None:
            state["_init_scale"] = self._scale.item()
            state["_init_growth_tracker"] = self._get_growth_tracker()
        return {**state, "_scale": None, "_growth_tracker": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what a pickle held; of its run the copy knows nothing."""
        self.__dict__.update(state)
        self._start()


def _checked_max_skipped(given: object) -> int | None:
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 1):
        return given
    msg = f"max_skipped must be a whole number of at least 1, or None for no limit. Got {given!r}."
    raise ScalingError(msg)


def _checked_callback(given: Any) -> Any:
    if given is None or callable(given):
        return given
    if given == "explain":
        return OverflowExplainer()
    msg = f"on_overflow must be a function of one argument, an Overflow, or 'explain', or None. Got {given!r}."
    raise ScalingError(msg)
