"""Kernels that let PyTorch do the work, and see to it that it is done right.

Under a policy with repairs, an op on which the policy and PyTorch agree stays PyTorch's. If it casts weights, a kernel here
first makes sure that PyTorch's kept casts of them are not stale (`mezzo.torch.freshness`). If it fails over dtypes, the
kernel makes the call again (`mezzo.torch.repairs`).

They are on the key of `mezzo.torch.switch`, before PyTorch's, and only in regions of mezzo's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mezzo import tables
from mezzo.decision import CastPolicy
from mezzo.torch.active import slot_for
from mezzo.torch.casting import device_for
from mezzo.torch.eager import runs_eagerly
from mezzo.torch.freshness import fresh_arguments, own_cast, tensors_in
from mezzo.torch.ops import NUMBERS, OpSpec, with_tensors
from mezzo.torch.plans import FUSED_LAYER, device_rules
from mezzo.torch.repairs import DTYPE_ERRORS, Repair, inside
from mezzo.torch.switch import KEY

Native = Callable[[Sequence[Any], dict[str, Any]], Any]
"""Calls PyTorch's kernel of an op with positional and keyword arguments."""

__all__ = ["make_watching_kernel", "repair_of_watched"]

_include = torch._C._dispatch_tls_set_dispatch_key_included
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_region_dtype = torch.get_autocast_dtype
_cache_enabled = torch.is_autocast_cache_enabled
_modes = torch._C._len_torch_dispatch_stack


def make_watching_kernel(
    spec: OpSpec, call: Callable[..., Any], lower_on: frozenset[str]
) -> tuple[Callable[..., Any], bool]:
    """Make the kernel that watches over PyTorch's own.

    Args:
        spec: The op.
        call: Calls it.
        lower_on: The device types on which PyTorch casts the op's inputs to a lower precision, and keeps casts of weights.

    Returns:
        A kernel for the key of `mezzo.torch.switch`, and whether it wants the keyset.
    """
    if spec.name == FUSED_LAYER:
        return _fused_kernel(spec), True
    if not lower_on and _has_ops_inside(spec):
        return _passing_kernel(spec, call), True
    native = _native(call)
    if spec.writes_lists:
        native = _checked_first(spec, call, native)
    elif spec.name in tables.promoted_first():
        native = _promoted_first(spec, call, native)
    elif lower_on:
        return _weights_kernel(spec, call, native, fresh_arguments(spec, lower_on)), False
    else:
        return _short_kernel(spec, call, native), False

    @runs_eagerly
    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            return native(args, kwargs)
        except DTYPE_ERRORS as error:
            fault = error
        return _mend(fault, spec, call, native, args, kwargs)

    return kernel, False


def _native(call: Callable[..., Any]) -> Native:
    def native(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # Not by excluding it, which would say that autocast is off there: ops inside may ask for the token.
        _include(KEY, False)
        try:
            return call(*args, **kwargs)
        finally:
            _include(KEY, True)

    return native


def _short_kernel(spec: OpSpec, call: Callable[..., Any], native: Native) -> Callable[..., Any]:
    # What `native` does, without a call in between: among these ops is layer_norm.
    @runs_eagerly
    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            _include(KEY, False)
            try:
                return call(*args, **kwargs)
            finally:
                _include(KEY, True)
        except DTYPE_ERRORS as error:
            fault = error
        return _mend(fault, spec, call, native, args, kwargs)

    return kernel


def _weights_kernel(
    spec: OpSpec, call: Callable[..., Any], native: Native, fresh: Callable[[Sequence[Any]], Sequence[Any] | None]
) -> Callable[..., Any]:
    def again(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        looked = fresh(args)
        return _without_cache(native, args, kwargs) if looked is None else native(looked, kwargs)

    # No keyset is asked for, and the way to PyTorch's kernel is as short as can be: this runs at every linear layer.
    @runs_eagerly
    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            looked = fresh(args)
            if looked is None:
                return _without_cache(native, args, kwargs)
            _include(KEY, False)
            try:
                return call(*looked, **kwargs)
            finally:
                _include(KEY, True)
        except DTYPE_ERRORS as error:
            fault = error
        return _mend(fault, spec, call, again, args, kwargs)

    return kernel


def _without_cache(native: Native, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    torch.set_autocast_cache_enabled(False)
    try:
        return native(args, kwargs)
    finally:
        torch.set_autocast_cache_enabled(True)


def _checked_first(spec: OpSpec, call: Callable[..., Any], native: Native) -> Native:
    """Make the call of an op that writes into lists: where it fails, it has written into some tensors already."""

    def checked_first(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = _device_of(args, kwargs)
        if device is not None and not inside.depth and slot_for(device).current().policy.repairs:
            repair = Repair(spec, device_for(device), call)
            if repair.is_mixed(args, kwargs):
                return repair.through_copies(tuple(args), kwargs)
        return native(args, kwargs)

    return checked_first


def _promoted_first(spec: OpSpec, call: Callable[..., Any], native: Native) -> Native:
    def promoted_first(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = _device_of(args, kwargs)
        if device is not None:
            args, kwargs = Repair(spec, device_for(device), call).promoted(tuple(args), kwargs)
        return native(args, kwargs)

    return promoted_first


# Composites in whose insides there is nothing to watch; among them are the hot ones.
_PLAIN_INSIDE = frozenset(
    f"aten::{name}" for name in ("layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm")
)


def _has_ops_inside(spec: OpSpec) -> bool:
    """Say whether an op that PyTorch does not list is made up of others, which may be listed."""
    if spec.name in _PLAIN_INSIDE:
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(spec.name, "CompositeImplicitAutograd"))


def _passing_kernel(spec: OpSpec, call: Callable[..., Any]) -> Callable[..., Any]:
    """Make the kernel of a composite op: the ops inside it come through the key too."""
    redispatch, after = spec.overload.redispatch, torch._C._dispatch_keyset_full_after(KEY)

    @runs_eagerly
    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        def passed_on(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            inside.depth += 1
            try:
                return redispatch(keyset & after, *args, **kwargs)
            finally:
                inside.depth -= 1

        try:
            return passed_on(args, kwargs)
        except DTYPE_ERRORS as error:
            fault = error
        return _mend(fault, spec, call, passed_on, args, kwargs)

    return kernel


_CAST_INSIDE = frozenset(
    ("qkv_weight", "qkv_bias", "proj_weight", "proj_bias", "ffn_weight_1", "ffn_bias_1", "ffn_weight_2", "ffn_bias_2")
)


def _fused_kernel(spec: OpSpec) -> Callable[..., Any]:
    """Make the kernel of the fused layer: the ops inside see views of the weights, of which no cast can be kept."""
    redispatch, after = spec.overload.redispatch, torch._C._dispatch_keyset_full_after(KEY)
    places = [place for place, name in spec.tensors if name in _CAST_INSIDE]

    def unwatched(keyset: torch._C.DispatchKeySet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _include(KEY, False)
        try:
            return redispatch(keyset & after, *args, **kwargs)
        finally:
            _include(KEY, True)

    @runs_eagerly
    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if args[0].is_cpu and not _modes():
            low = _region_dtype("cpu")
            if all(args[place].dtype is low for place in places):
                # Stored low, no weight is cast inside. If dtypes fail there, what is below mends it.
                with contextlib.suppress(*DTYPE_ERRORS):
                    return unwatched(keyset, args, kwargs)
        if args[0].is_cpu and _cache_enabled() and not _modes():
            low, new = _region_dtype("cpu"), list(args)
            for place in places:
                if type(args[place]) is torch.nn.Parameter and args[place].dtype is torch.float32:
                    new[place] = own_cast(args[place], "aten::addmm", low)
            args = tuple(new)
        return redispatch(keyset & after, *args, **kwargs)

    return kernel


def _mend(
    fault: BaseException,
    spec: OpSpec,
    call: Callable[..., Any],
    native: Native,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    places = [index for index, _ in spec.tensors]
    if any(args[place].__class__ in NUMBERS for place in places if place < len(args)):
        # PyTorch hands over the number that a tensor stood for, and does not take it back here.
        args = with_tensors(args, places)
        try:
            return native(args, kwargs)
        except DTYPE_ERRORS as error:
            fault = error
    device = _device_of(args, kwargs)
    if inside.depth or device is None or not slot_for(device).current().policy.repairs:
        raise fault
    return Repair(spec, device_for(device), call).mend(fault, native, args, kwargs)


def repair_of_watched(
    spec: OpSpec, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Repair, CastPolicy | None] | None:
    """Give what would repair a call, and the rule by which PyTorch runs it; None if nothing would."""
    device = _device_of(args, kwargs)
    if inside.depth or device is None or not slot_for(device).current().policy.repairs:
        return None
    return Repair(spec, device_for(device), call), device_rules(device, _low(device)).get(spec.name)


def _device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Give the device type that autocast is on for here, of those on which the tensors are."""
    for tensor in tensors_in((*args, *kwargs.values())):
        device = tensor.device.type
        if torch.amp.is_autocast_available(device) and not _is_excluded(device_for(device).key):
            return device
    return None


def _low(device: str) -> str:
    return "float16" if _region_dtype(device) is torch.float16 else "bfloat16"
