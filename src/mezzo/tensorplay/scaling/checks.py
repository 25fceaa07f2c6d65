"""Checks of what a `GradScaler` is given: its device, numbers that are set later, and those of checkpoints."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any

import tensorplay

from mezzo.errors import DeviceError, ScalingError
from mezzo.scaling import LossScaling

__all__ = ["device_type", "factor", "interval", "scale_in", "tracker_in", "with_changes"]


def device_type(device: Any) -> str:
    """Give the type of a device that a scaler is made for; `DeviceError` if there is no such device."""
    if isinstance(device, tensorplay.Device):
        return str(device.type)
    try:
        return str(tensorplay.Device(device).type)
    except (TypeError, ValueError):
        msg = (
            f"GradScaler got device {device!r}; allowed is 'cpu' or 'cuda', the type of the device that the losses are on, "
            "or a tensorplay.Device."
        )
        raise DeviceError(msg) from None


def with_changes(numbers: Any, **changes: float) -> Any:
    """Give a copy of a scaler's numbers with others in place of some, which have been checked."""
    # Past the checks of `LossScaling`, which have been made: its own numbers have to move the scale.
    changed = copy.copy(numbers)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed


def factor(name: str, given: Any) -> float:
    """Check a factor that is set after the scaler was made."""
    # The constructor's numbers have to move the scale. Later they may be 1: that is how a scale is frozen.
    if isinstance(given, int | float) and not isinstance(given, bool) and given == 1:
        return 1.0
    return float(getattr(LossScaling(**{name: given}), name))


def interval(given: Any) -> int:
    """Check a growth interval."""
    return LossScaling(growth_interval=given).growth_interval


def scale_in(state: Mapping[str, Any]) -> float:
    """Check the scale of a checkpoint."""
    try:
        return LossScaling(init_scale=state["scale"]).init_scale
    except ScalingError as error:
        msg = (
            f"The source state dict has scale {state['scale']!r}, with which no gradient survives: the scale of the run "
            "that saved it has collapsed, or is no number. Set state_dict['scale'] to one such as 65536.0 before loading."
        )
        raise ScalingError(msg) from error


def tracker_in(state: Mapping[str, Any]) -> int:
    """Check the growth tracker of a checkpoint."""
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
    return tracker
