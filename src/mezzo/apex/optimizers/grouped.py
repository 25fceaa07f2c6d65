"""What a constructor is given as parameters, looked at before PyTorch's takes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__ = ["Parameters", "all_on", "listed"]

Parameters = Iterable[Any]
"""Tensors, pairs of name and tensor, or groups: dicts with any of these in ``"params"``."""


def listed(params: Parameters) -> list[Any]:
    """Give parameters as a list, with iterators in groups listed too, so that one can go through them twice.

    Args:
        params: As an optimizer takes them.

    Returns:
        The same for an optimizer. Groups are copies.
    """
    if isinstance(params, Tensor):
        # PyTorch's own error is about what came.
        return params  # type: ignore[return-value]
    return [{**one, "params": _members(one)} if isinstance(one, dict) else one for one in params]


def _members(group: dict[str, Any]) -> Any:
    held = group["params"]
    return [held] if isinstance(held, Tensor) else held if isinstance(held, set) else list(held)


def all_on(params: list[Any], *devices: str) -> bool | None:
    """Say whether PyTorch's fused kernels take all the parameters.

    Args:
        params: From `listed`.
        *devices: Types of devices whose kernels will do.

    Returns:
        True, or None, which leaves the choice to PyTorch.
    """
    members = [each for one in params for each in (one["params"] if isinstance(one, dict) else [one])]
    tensors = [each[1] if isinstance(each, tuple) else each for each in members]
    takes = all(isinstance(one, Tensor) and one.device.type in devices and one.is_floating_point() for one in tensors)
    return True if takes and tensors else None
