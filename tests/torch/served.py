"""Running one call twice: by PyTorch's own autocast kernels, and by mezzo's for every listed op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from mezzo.torch.active import Active, slot_for
from mezzo.torch.kernels import install, serve_all


@contextmanager
def autocast_state(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Turn autocast on by hand, which also works for a device that is not there (on fake tensors)."""
    enabled, before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, before)


@contextmanager
def served_by_mezzo(device: str, hits: set[str]) -> Iterator[None]:
    """Let mezzo serve every listed op, and collect which ops it served."""
    slot = slot_for(device)
    with serve_all(device) as plan:
        install(plan)

        def noting(served: Any) -> Any:
            def action(args: Any, kwargs: Any, low: Any) -> Any:
                hits.add(served.op)
                return served.action(args, kwargs, low)

            return type(served)(served.op, served.rule, action if served.action else None)

        before = slot.enter(Active(plan.policy, plan.wrapped(noting)))
        try:
            yield
        finally:
            slot.leave(before)


@dataclass
class Outcome:
    """What a call gave: its tensors, or the error it raised."""

    value: Any = None
    error: Exception | None = None


def outcome(call: Callable[..., Any], args: Any, kwargs: Any) -> Outcome:
    """Run a call on copies of its arguments, with the random numbers it would get each time."""
    args, kwargs = tree_map_only(torch.Tensor, copy_of, (args, kwargs))
    torch.manual_seed(0)
    try:
        return Outcome(value=call(*args, **kwargs))
    except Exception as error:
        return Outcome(error=error)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def differences(native: Outcome, served: Outcome, *, values: bool = True, rtol: float = 0.0) -> list[str]:
    """Say how two outcomes differ: in structure, dtype, shape or, to the last bit, in value."""
    if served.error is not None:
        return [f"mezzo raises {type(served.error).__name__}: {served.error}"]
    ours, theirs = tree_leaves(served.value), tree_leaves(native.value)
    if len(ours) != len(theirs):
        return [f"{len(theirs)} results natively, {len(ours)} served"]
    found = []
    for mine, theirs_one in zip(ours, theirs, strict=True):
        if not isinstance(theirs_one, torch.Tensor):
            if mine != theirs_one:
                found.append(f"{theirs_one!r} natively, {mine!r} served")
            continue
        if mine.dtype != theirs_one.dtype or mine.shape != theirs_one.shape or mine.device != theirs_one.device:
            found.append(
                f"{theirs_one.dtype} {tuple(theirs_one.shape)} natively, {mine.dtype} {tuple(mine.shape)} served"
            )
        elif values and not same_values(mine, theirs_one, rtol):
            found.append(f"values differ, dtype {mine.dtype}")
    return found


def same_values(one: torch.Tensor, other: torch.Tensor, rtol: float) -> bool:
    if one.layout != torch.strided or one.is_quantized:
        one, other = one.to_dense(), other.to_dense()
    return torch.allclose(one, other, rtol=rtol, atol=rtol, equal_nan=True) if one.numel() else True
