"""Gradient scaling as functions of tensors: nothing is written into, nothing is read on the host, all of it compiles.

For training steps that are one compiled function, and for code in the style of `torch.func`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mezzo.errors import ScalingError
from mezzo.scaling import LossScaling

__all__ = ["next_scale", "select_finite", "unscale_gradients"]

T = TypeVar("T")


def unscale_gradients(gradients: Sequence[Tensor], scale: Tensor) -> tuple[list[Tensor], Tensor]:
    """Divide gradients by the scale, and say whether any is not finite then.

    Computed in float32 or wider, and looked at after the division: what is called finite is finite as returned.

    Args:
        gradients: Any shapes, floating or complex dtypes, strided. They are not written into.
        scale: The scale they were multiplied by; float32, of no dimension.

    Returns:
        The divided gradients, each in its dtype, and ``found_inf``: float32, of no dimension, on the scale's device; 1 if a
        value is Inf or NaN, else 0.

    Raises:
        ScalingError: The scale is no tensor, or the gradients are no sequence.

    Example:
        >>> import torch
        >>> gradients, found_inf = unscale_gradients([torch.tensor([8.0, 4.0])], torch.tensor(8.0))
        >>> gradients, found_inf
        ([tensor([1.0000, 0.5000])], tensor(0.))
    """
    # As PyTorch's scaler does: the inverse in float64, rounded once.
    if not isinstance(scale, Tensor) or isinstance(gradients, Tensor | Mapping):
        raise ScalingError(_wrong_gradients(gradients, scale))
    inverse = scale.to(_wide(scale)).reciprocal().to(torch.float32)
    quotients = [_times(gradient, inverse) for gradient in gradients]
    if not quotients:
        return [], torch.zeros((), dtype=torch.float32, device=scale.device)
    unsound = [(~torch.isfinite(quotient)).any().to(scale.device) for quotient in quotients]
    return quotients, torch.stack(unsound).any().to(torch.float32)


def _wrong_gradients(gradients: object, scale: object) -> str:
    return (
        "unscale_gradients takes a sequence of tensors and the scale as a tensor; got gradients of type "
        f"{type(gradients).__name__} and a scale of type {type(scale).__name__}. Pass list(gradients.values()) of a "
        "mapping, [gradient] of a single tensor, torch.tensor(scale) of a number."
    )


def next_scale(scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, numbers: LossScaling) -> tuple[Tensor, Tensor]:
    """Give the scale and the growth tracker after an iteration: `LossScaling.next`, on the device.

    The same to the bit, for the verdicts ``finite`` and ``inf``. It does not tell a lasting NaN from an Inf, as it has only
    ``found_inf`` to go by: ``max_nan_backoffs`` is not looked at, and ``min_scale`` is what ends the backing off.

    Args:
        scale: The scale in which the iteration ran; float32, of no dimension.
        growth_tracker: How many finite iterations there were in a row; an integer dtype, of no dimension.
        found_inf: What `unscale_gradients` gave: 0 if all was finite. Of no dimension, on the same device.
        numbers: The rule.

    Returns:
        The next scale and the next tracker: new tensors, in the dtypes and on the device of the old ones.

    Example:
        >>> import torch
        >>> from mezzo import LossScaling
        >>> state = torch.tensor(1024.0), torch.tensor(0)
        >>> next_scale(*state, found_inf=torch.tensor(1.0), numbers=LossScaling())
        (tensor(512.), tensor(0))
    """
    wide = scale.to(_wide(scale))
    backed_off = torch.maximum((wide * numbers.backoff_factor).to(torch.float32), scale.clamp(max=numbers.min_scale))
    grown = (wide * numbers.growth_factor).to(torch.float32)
    kept = torch.isfinite(grown)
    if numbers.max_scale is not None:
        grown = torch.minimum(grown, scale.clamp(min=numbers.max_scale))
    grown = torch.where(kept, grown, scale)

    tracker = growth_tracker + 1
    grows = tracker >= numbers.growth_interval
    finite = found_inf == 0
    after = torch.where(finite, torch.where(grows, grown, scale), backed_off)
    return after, torch.where(finite & ~grows, tracker, torch.zeros_like(tracker))


def select_finite(found_inf: Tensor, new: T, old: T) -> T:
    """Give the new values if all was finite, else the old ones: how a step is skipped without a host read.

    Args:
        found_inf: What `unscale_gradients` gave: 0 if all was finite. Of no dimension.
        new: A pytree of what the step would make: parameters, moments, step counts as tensors.
        old: What it was before; the same nest, with tensors of the same shapes and dtypes. What is no tensor in it must be
            equal in both.

    Returns:
        The same nest. A tensor in it is a new one.

    Raises:
        ScalingError: The two do not match.

    Example:
        >>> import torch
        >>> select_finite(torch.tensor(1.0), {"weight": torch.ones(2)}, {"weight": torch.zeros(2)})
        {'weight': tensor([0., 0.])}
    """
    after, nest = pytree.tree_flatten(new)
    before, other = pytree.tree_flatten(old)
    if nest != other:
        msg = f"select_finite got two different nests, {nest} and {other}; give the old values in the nest of the new ones."
        raise ScalingError(msg)
    skipped = found_inf != 0
    chosen = [_choose(skipped, *pair) for pair in zip(after, before, strict=True)]
    return pytree.tree_unflatten(chosen, nest)  # type: ignore[no-any-return]


def _choose(skipped: Tensor, new: Any, old: Any) -> Any:
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        if new.shape != old.shape or new.dtype != old.dtype:
            msg = (
                f"select_finite got a new tensor of {new.dtype} and shape {tuple(new.shape)} for an old one of {old.dtype} "
                f"and shape {tuple(old.shape)}; a skipped step must give back what it got, so make them alike."
            )
            raise ScalingError(msg)
        return torch.where(skipped.to(new.device), old, new)
    if isinstance(new, Tensor) or isinstance(old, Tensor) or new != old:
        msg = (
            f"select_finite got {new!r} for {old!r}: only between tensors can the device choose. Make it a tensor, such as "
            "a step count torch.tensor(0), or leave it out."
        )
        raise ScalingError(msg)
    return new


def _times(gradient: Tensor, inverse: Tensor) -> Tensor:
    there = inverse.to(gradient.device)
    if gradient.dtype.itemsize >= (8 if gradient.dtype.is_complex else 4):
        return gradient * there
    wide = torch.complex64 if gradient.dtype.is_complex else torch.float32
    return (gradient.to(wide) * there).to(gradient.dtype)


def _wide(scale: Tensor) -> torch.dtype:
    # Apple's GPUs have no float64. With powers of two as factors, float32 gives the same.
    return torch.float32 if scale.device.type == "mps" else torch.float64
