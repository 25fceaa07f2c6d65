"""The numbers of a `GradScaler`: kept, checked, read, set, saved and loaded, with TensorPlay's names and formats.

They live on the host, where `mezzo.scaling` moves them; the device has a copy of the scale, for the losses.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import tensorplay
from tensorplay import Tensor

from mezzo.errors import ScalerProtocolError, ScalingError
from mezzo.scaling import LossScaling, ScaleState

from .checks import device_type, factor, interval, scale_in, tracker_in, with_changes

__all__ = ["Numbers"]

_OF_THE_RUN = ("_scale", "_turns", "_history", "_names", "_unscaled", "_calls", "_heard", "_warned")
"""What no copy of a scaler has."""


class Numbers(tensorplay.amp.GradScaler):  # type: ignore[misc]
    """A scaler's numbers; what it does with them is in `mezzo.tensorplay.scaler`.

    A subclass of TensorPlay's, for the code that asks for one. No public method of it is inherited.
    """

    _numbers: Any
    _state: ScaleState

    def __init__(self, device: Any, numbers: dict[str, Any], *, enabled: bool) -> None:
        self._device = device_type(device)
        self._enabled = bool(enabled)
        if self._enabled and self._device == "cuda" and not tensorplay.cuda.is_available():
            # TensorPlay's words: scripts filter them.
            text = "tensorplay.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
            warnings.warn(text, UserWarning, stacklevel=3)
            self._enabled = False
        # A disabled scaler takes what comes, as TensorPlay's: a script's switch is not to turn into an error.
        self._numbers = LossScaling(**numbers) if self._enabled else SimpleNamespace(**numbers)
        self._state = self._numbers.start() if self._enabled else ScaleState(1.0)
        self._start()

    def _start(self) -> None:
        """Know nothing of any run. The scale is put on a device by the first `scale`."""
        self._scale: Tensor | None = None

    def _put_scale(self, device: Any) -> None:
        # A new tensor: losses that were scaled with the old one, and have their backward pass to come, keep that.
        self._scale = tensorplay.full((), self._state.scale, dtype=tensorplay.float32, device=device)

    def _move_to(self, state: ScaleState) -> None:
        moved = state.scale != self._state.scale
        self._state = state
        if moved and self._scale is not None:
            self._put_scale(self._scale.device)

    def _begin(self, funcname: str) -> Tensor:
        if self._scale is None:
            msg = (
                f"Attempted {funcname} but _scale is None.  This may indicate your script did not use scaler.scale(loss or "
                "outputs) earlier in the iteration. Call scaler.scale(loss).backward() first."
            )
            raise ScalerProtocolError(msg)
        return self._scale

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        return self._state.growth_tracker if self._enabled else 0

    def is_enabled(self) -> bool:
        """Say whether the scaler does anything: a disabled one passes losses through and steps always."""
        return self._enabled

    def get_scale(self) -> float:
        """Give the scale; 1.0 if disabled. No host read: the number is there."""
        return self._state.scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """Give what the scale is multiplied by when it grows."""
        return self._numbers.growth_factor  # type: ignore[no-any-return]

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by when it grows.

        Args:
            new_factor: Above 1; or 1, for a scale that does not grow.

        Raises:
            ScalingError: It is not; the old one stays.
        """
        self._numbers = with_changes(self._numbers, growth_factor=factor("growth_factor", new_factor))

    def get_backoff_factor(self) -> float:
        """Give what the scale is multiplied by after gradients that were not finite."""
        return self._numbers.backoff_factor  # type: ignore[no-any-return]

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after gradients that were not finite.

        Args:
            new_factor: Between 0 and 1; or 1, for a scale that does not fall.

        Raises:
            ScalingError: It is not; the old one stays.
        """
        self._numbers = with_changes(self._numbers, backoff_factor=factor("backoff_factor", new_factor))

    def get_growth_interval(self) -> int:
        """Give after how many finite iterations in a row the scale grows."""
        return self._numbers.growth_interval  # type: ignore[no-any-return]

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many finite iterations in a row the scale grows.

        If there were more already, it grows after the next one; TensorPlay's own does not before the next overflow.

        Args:
            new_interval: At least 1.

        Raises:
            ScalingError: It is not; the old one stays.
        """
        self._numbers = with_changes(self._numbers, growth_interval=interval(new_interval))

    # Saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint needs, in the format of TensorPlay and PyTorch; call it after `update`.

        Returns:
            ``scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval`` and ``_growth_tracker``; empty if
            disabled.
        """
        if not self._enabled:
            return {}
        return {
            "scale": self._state.scale,
            "growth_factor": self._numbers.growth_factor,
            "backoff_factor": self._numbers.backoff_factor,
            "growth_interval": self._numbers.growth_interval,
            "_growth_tracker": self._state.growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave: here, or of ``tensorplay.amp.GradScaler``, or of a scaler for PyTorch.

        Args:
            state_dict: The five entries; others are ignored. A disabled scaler ignores it all.

        Raises:
            ScalerProtocolError: It is empty, as of a scaler that was disabled.
            KeyError: An entry is missing.
            ScalingError: It is no mapping, or a number is not allowed, such as a scale that has collapsed to 0. The
                scaler stays as it was.
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
        state = ScaleState(scale_in(state_dict), tracker_in(state_dict))
        numbers = with_changes(
            self._numbers,
            growth_factor=factor("growth_factor", state_dict["growth_factor"]),
            backoff_factor=factor("backoff_factor", state_dict["backoff_factor"]),
            growth_interval=interval(state_dict["growth_interval"]),
        )
        self._numbers = numbers
        self._move_to(state)

    def _set_scale(self, new_scale: Any) -> None:
        if isinstance(new_scale, Tensor) and (new_scale.numel() != 1 or new_scale.requires_grad):
            msg = (
                "new_scale should be a float or a 1-element tensor with requires_grad=False. Got a tensor of shape "
                f"{tuple(new_scale.shape)} with requires_grad={new_scale.requires_grad}."
            )
            raise ScalingError(msg)
        try:
            number = LossScaling(init_scale=new_scale.item() if isinstance(new_scale, Tensor) else new_scale).init_scale
        except ScalingError as error:
            raise ScalingError(str(error).replace("init_scale", "new_scale")) from None
        self._move_to(replace(self._state, scale=number))

    def __getstate__(self) -> dict[str, Any]:
        """Give what a pickle or a copy holds: the numbers, with the scale as it is now.

        Raises:
            ScalerProtocolError: In the midst of an iteration.
        """
        if self._enabled and self.__dict__.get("_turns"):
            msg = (
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update(). Call update() first."
            )
            raise ScalerProtocolError(msg)
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THE_RUN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what a pickle held; of its run the copy knows nothing."""
        self.__dict__.update(state)
        self._start()
