"""How the scale moves on the device: PyTorch's kernel, and where they could matter floor, ceiling and the NaN rule."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Rule", "add_up", "guarded_update_", "set_scale_", "update_"]


class Rule(NamedTuple):
    """The numbers by which a scale moves; see `mezzo.LossScaling`, which is stricter. A scale is frozen by factors of 1."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float | None


def add_up(flags: list[Tensor], device: torch.device) -> Tensor:
    """Bring flags together on one device: a new tensor if there are several, without a host read."""
    there = [flag.to(device, non_blocking=True) for flag in flags]
    if len(there) == 1:
        return there[0]
    return torch.stack([flag.reshape(()) for flag in there]).amax()


def update_(scale: Tensor, tracker: Tensor, found: Tensor, growth: float, backoff: float, interval: int) -> None:
    """Move scale and tracker in place, by PyTorch's rule alone."""
    torch._amp_update_scale_(scale, tracker, found, growth, backoff, interval)


def guarded_update_(scale: Tensor, tracker: Tensor, found: Tensor, rule: Rule, hold: Tensor | None) -> None:
    """Move scale and tracker in place, between floor and ceiling.

    Args:
        scale: float32, of no dimension.
        tracker: int32, of no dimension.
        found: float32, of no dimension; 0 if the iteration was finite.
        rule: The rule.
        hold: If given, float32 of no dimension: where it is not 0 the scale does not fall.
    """
    before = scale.clone()
    torch._amp_update_scale_(
        scale,
        tracker,
        found,
        rule.growth_factor,
        rule.backoff_factor,
        rule.growth_interval,
    )
    # They stop a movement. A scale that is beyond them, because somebody set it so, stays where it is.
    floor = before.clamp(max=rule.min_scale)
    if hold is not None:
        floor = torch.where(hold > 0, before, floor)
    scale.copy_(torch.maximum(scale, floor))
    if rule.max_scale is not None:
        scale.copy_(torch.minimum(scale, before.clamp(min=rule.max_scale)))


def set_scale_(scale: Tensor, new: Tensor) -> None:
    """Set the scale to a number that the host does not know; one that could be no scale leaves it as it is."""
    number = new.detach().reshape(()).to(scale.device, torch.float32, non_blocking=True)
    possible = number.isfinite() & (number >= 2.0**-126)
    scale.copy_(torch.where(possible, number, scale))
