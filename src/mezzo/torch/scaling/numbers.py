"""The numbers of a `GradScaler`: kept, checked, read, set, saved and loaded, with PyTorch's names and formats."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import DeviceError, ScalerProtocolError, ScalingError
from mezzo.scaling import LossScaling
from mezzo.torch.eager import runs_eagerly

from .overflow_explaining import OverflowExplainer

__all__ = ["Numbers"]

_LARGEST_TRACKER = 2**31 - 1
"""What int32 holds; a longer interval is never over."""

_NOT_USED_YET = "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the iteration."


class Numbers(torch.amp.GradScaler):
    """A scaler's numbers; what it does with them is in `mezzo.torch.scaler`.

    A subclass of PyTorch's, for the code that asks for one. Nothing of it is inherited: each of its methods, the
    private ones too, is defined here or there, so that another version of PyTorch changes nothing.
    """

    def __init__(self, device: str | torch.device, numbers: dict[str, Any], *, enabled: bool) -> None:
        self._device = _device_type(device)
        self._enabled = bool(enabled)
        if self._enabled and self._device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            # PyTorch's words: scripts filter them.
            text = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
            warnings.warn(text, UserWarning, stacklevel=4)
            self._enabled = False
        # A disabled scaler takes what comes, as PyTorch's: a script's switch is not to turn into an error.
        checked = vars(LossScaling(**numbers)) if self._enabled else numbers
        self._init_scale: float = checked["init_scale"]
        self._init_growth_tracker = 0
        self._growth_factor: float = checked["growth_factor"]
        self._backoff_factor: float = checked["backoff_factor"]
        self._growth_interval: int = checked["growth_interval"]
        self._min_scale: float = checked["min_scale"]
        self._max_scale: float | None = checked["max_scale"]
        self._max_nan_backoffs: int | None = checked["max_nan_backoffs"]
        # Made by the first `scale`, on the device of what it is given.
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        for name in ("_scale", "_growth_tracker"):
            if getattr(self, name) is None:
                msg = f"Attempted {funcname} but {name} is None.  {_NOT_USED_YET}"
                raise ScalerProtocolError(msg)
        return self._scale, self._growth_tracker  # type: ignore[return-value]

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        return self._init_growth_tracker if self._growth_tracker is None else int(self._growth_tracker.item())

    def is_enabled(self) -> bool:
        """Say whether the scaler does anything: a disabled one passes losses through and steps always."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """Give what the scale is multiplied by when it grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by when it grows.

        Args:
            new_factor: Above 1; or 1, for a scale that does not grow.

        Raises:
            ScalingError: It is not; the old one stays.
        """
        self._growth_factor = _factor("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """Give what the scale is multiplied by after gradients that were not finite."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after gradients that were not finite.

        Args:
            new_factor: Between 0 and 1; or 1, for a scale that does not fall.

        Raises:
            ScalingError: It is not; the old one stays.
        """
        self._backoff_factor = _factor("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Give after how many finite iterations in a row the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many finite iterations in a row the scale grows.

        If there were more already, it grows after the next one; PyTorch's does not before the next overflow.

        Args:
            new_interval: At least 1.

        Raises:
            ScalingError: It is not; the old one stays.
        """
        self._growth_interval = LossScaling(growth_interval=new_interval).growth_interval
        self._keep_tracker_in_interval()

    def _keep_tracker_in_interval(self) -> None:
        # PyTorch's kernel grows the scale when the tracker is equal to the interval, and so never if it is beyond it.
        self._init_growth_tracker = min(self._init_growth_tracker, self._growth_interval - 1)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=min(self._growth_interval, _LARGEST_TRACKER) - 1)

    # Saving and loading

    @runs_eagerly
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, of this class or of ``torch.amp.GradScaler``.

        Args:
            state_dict: The five entries; others are ignored. A disabled scaler ignores it all.

        Raises:
            RuntimeError: It is empty, as of a scaler that was disabled.
            KeyError: An entry is missing.
            ScalingError: A number is not allowed, such as a scale that has collapsed to 0. The scaler stays as it was.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, Mapping):
            msg = f"load_state_dict takes what state_dict() gave, a dict; got {state_dict!r:.80}."
            raise ScalingError(msg)
        if len(state_dict) == 0:
            msg = (
                "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler. "
                "Leave load_state_dict out to start with the scale that this one was made with."
            )
            raise ScalerProtocolError(msg)
        # All of it is checked before any of it is taken.
        scale = _scale_in(state_dict)
        factors = (
            _factor("growth_factor", state_dict["growth_factor"]),
            _factor("backoff_factor", state_dict["backoff_factor"]),
        )
        interval = LossScaling(growth_interval=state_dict["growth_interval"]).growth_interval
        tracker = _tracker_in(state_dict)
        self._init_scale, self._init_growth_tracker = scale, tracker
        self._growth_factor, self._backoff_factor = factors
        self._growth_interval = interval
        if self._scale is not None:
            self._scale.fill_(scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(tracker)
        self._keep_tracker_in_interval()
        self._scale_was_set(scale)
        self._was_loaded(tracker)

    def _was_loaded(self, tracker: int) -> None:
        """Hear that the run goes on from a checkpoint."""

    def _scale_was_set(self, scale: float | None) -> None:
        """Hear that the scale has another value; None where it is not known."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the scaler; the copy agrees in the same process group, which cannot be copied."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        state = self._state_to_keep()
        shared: dict[str, Any] = {name: state.pop(name) for name in ("_process_group", "_on_overflow") if name in state}
        if isinstance(shared.get("_on_overflow"), OverflowExplainer):
            shared["_on_overflow"] = OverflowExplainer()
        twin.__setstate__({**copy.deepcopy(state, memo), **shared})
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Give what a pickle holds: the numbers, with the scale as it is now.

        Raises:
            ScalerProtocolError: In the midst of an iteration, or with a process group, which no pickle can hold.
        """
        state = self._state_to_keep()
        if state.get("_process_group") is not None:
            msg = (
                "A GradScaler with a process_group cannot be pickled: the group lives in this process. Save "
                "scaler.state_dict(), and load it into a GradScaler that was made with its own group."
            )
            raise ScalerProtocolError(msg)
        return state

    def _state_to_keep(self) -> dict[str, Any]:
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what a pickle held."""
        self.__dict__.update(state)


def _device_type(device: str | torch.device) -> str:
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        msg = (
            f"GradScaler got device {device!r}; allowed is the type of a device that this PyTorch knows, such as 'cuda' or "
            f"'cpu', or a torch.device. {error}"
        )
        raise DeviceError(msg) from error
    return kind


def _factor(name: str, given: Any) -> float:
    # The constructor's numbers have to move the scale. Later they may be 1: that is how a scale is frozen.
    if isinstance(given, int | float) and not isinstance(given, bool) and given == 1:
        return 1.0
    return float(getattr(LossScaling(**{name: given}), name))


def _scale_in(state: Mapping[str, Any]) -> float:
    try:
        return LossScaling(init_scale=state["scale"]).init_scale
    except ScalingError as error:
        msg = (
            f"The source state dict has scale {state['scale']!r}, with which no gradient survives: the scale of the run "
            "that saved it has collapsed, or is no number. Set state_dict['scale'] to one such as 65536.0 before loading."
        )
        raise ScalingError(msg) from error


def _tracker_in(state: Mapping[str, Any]) -> int:
    given: Any = state["_growth_tracker"]
    try:
        tracker = operator.index(given)
    except TypeError:
        tracker = -1
    if tracker < 0:
        msg = (
            f"The source state dict has _growth_tracker {given!r}; it must be a whole number of at least 0: how many finite "
            "iterations there were in a row."
        )
        raise ScalingError(msg)
    return min(tracker, _LARGEST_TRACKER)
