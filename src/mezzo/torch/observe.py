"""`observe`: which listed ops ran, in which dtypes, with how many casts.

An observer is a change of plan: every op that the policy lists is served by mezzo for the time, through an action that takes
a note. Nothing is added to kernels while nobody looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mezzo.decision import CastPolicy, input_dtypes
from mezzo.policy import Policy
from mezzo.torch.actions import Action
from mezzo.torch.active import slot_for
from mezzo.torch.cache import is_cached
from mezzo.torch.casting import device_for, dtype_name
from mezzo.torch.kernels import install
from mezzo.torch.ops import check_device, op_spec
from mezzo.torch.plans import Plan, Served, build_plan

__all__ = ["Observation", "OpCall", "observe"]


@dataclass(frozen=True)
class OpCall:
    """One call of an op that the policy lists.

    Attributes:
        op: Canonical name, ``"aten::linear"``.
        rule: The cast policy that ruled it.
        input_dtypes: The dtype names of the tensors that came, in the order of the arguments.
        output_dtype: The dtype name of the first tensor that went out, None if none did.
        casts: How many casts were made for this call; the cast of a weight that was kept from an earlier call is not one.
        cast_bytes: How many bytes these casts wrote.
    """

    op: str
    rule: CastPolicy
    input_dtypes: tuple[str, ...]
    output_dtype: str | None
    casts: int
    cast_bytes: int


@dataclass
class Observation:
    """What was seen.

    Attributes:
        calls: One record per call, in order.
    """

    calls: list[OpCall] = field(default_factory=list)

    def by_dtype(self) -> Counter[str]:
        """Count the calls by the dtype that went out."""
        return Counter(call.output_dtype for call in self.calls if call.output_dtype is not None)

    @property
    def casts(self) -> int:
        """How many casts were made in all."""
        return sum(call.casts for call in self.calls)


@contextmanager
def observe(device_type: str) -> Iterator[Observation]:
    """Watch the listed ops of a device in this thread, in regions that are open or are opened inside.

    Observing slows the ops down and changes no number. An op is seen when it passes through autocast: at the outermost call
    of a listed op, in an enabled region, forward or backward.

    Args:
        device_type: The device type, ``"cpu"``.

    Yields:
        An `Observation` that fills while the block runs.

    Raises:
        RuntimeError: The string is no device type.
        DeviceError: There is no autocast for the device.

    Example:
        >>> import torch, mezzo.torch
        >>> linear = torch.nn.Linear(4, 4)
        >>> with mezzo.torch.observe("cpu") as seen, mezzo.torch.autocast("cpu", dtype=torch.bfloat16):
        ...     _ = linear(torch.ones(2, 4))
        >>> [(call.op, call.output_dtype, call.casts) for call in seen.calls]
        [('aten::linear', 'bfloat16', 3)]
    """
    device_type = check_device(device_type)
    slot = slot_for(device_type)
    seen = Observation()
    outer = slot.observer

    @cache
    def observed(policy: Policy) -> Plan:
        if outer is not None:
            plan = outer(policy)
        else:
            plan = build_plan(policy, device_type, serve="all")
            install(plan)
        return plan.wrapped(lambda served: _observed(served, device_type, seen))

    slot.observe(observed)
    active = slot.active
    observed(slot.current().policy)
    # An open region is entered again, to look in; outside of any the observer is asked at each call.
    before = slot.enter(active) if active is not None else None
    try:
        yield seen
    finally:
        if active is not None:
            slot.leave(before)
        slot.observe(outer)


def _observed(served: Served, device_type: str, seen: Observation) -> Served:
    action, rule, spec = served.action, served.rule, op_spec(served.op)
    if action is None or rule is None or spec is None:
        return served
    places = [index for index, _ in (*spec.tensors, *spec.tensor_lists)]
    eligible = device_for(device_type).eligible

    def noting(args: tuple[Any, ...], kwargs: dict[str, Any], low_dtype: torch.dtype) -> Any:
        tensors = _tensors([args[place] for place in places if place < len(args)])
        casts = _casts(rule, tensors, low_dtype, eligible)
        dtypes = tuple(dtype_name(tensor.dtype) for tensor in tensors)
        result = action(args, kwargs, low_dtype)
        out = next(iter(_tensors([result])), None)
        made = len(casts), sum(casts)
        seen.calls.append(OpCall(served.op, rule, dtypes, None if out is None else dtype_name(out.dtype), *made))
        return result

    observed: Action = noting
    return replace(served, action=observed)


def _tensors(values: list[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _casts(rule: CastPolicy, tensors: list[Tensor], low_dtype: torch.dtype, eligible: Any) -> list[int]:
    """Give the bytes of each cast that the rule is about to make."""
    on_device = [tensor for tensor in tensors if eligible(tensor)]
    came = [dtype_name(tensor.dtype) for tensor in on_device]
    sizes = []
    cast_now: set[int] = set()  # a weight that comes twice in one call is cast once
    for tensor, before, after in zip(on_device, came, input_dtypes(rule, came, dtype_name(low_dtype)), strict=True):
        target = getattr(torch, after)
        kept = rule is CastPolicy.LOWER_PRECISION_FP and (is_cached(tensor, target) or id(tensor) in cast_now)
        if before != after and not kept:
            sizes.append(tensor.numel() * target.itemsize)
            if tensor.requires_grad and tensor.is_leaf and torch.is_autocast_cache_enabled():
                cast_now.add(id(tensor))
    return sizes
