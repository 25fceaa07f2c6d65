"""Kernels: how mezzo gets to see a call, on PyTorch's own autocast dispatch keys.

For each op that some policy has changed, one kernel is registered on the device's autocast key through `torch.library`, the
way PyTorch's accelerator guide does it in C++. At every call it asks the thread's active plan (`mezzo.torch.active`):

* the op is in the plan: its action casts and runs it, with the key excluded for the ops inside;
* it is not, and PyTorch lists it: the action for PyTorch's own rule does the same;
* it is not, and PyTorch does not list it: the op goes on past the key, with autocast still on for the ops inside it.

If that raises over dtypes and the plan has a repair for the op, the repair (`mezzo.torch.repairs`) makes the call again.

Kernels are registered when a policy that needs them is first used, once per process, and stay: a thread may be running one.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from mezzo import tables
from mezzo.decision import CastPolicy
from mezzo.torch.actions import Action, action_for, call_of
from mezzo.torch.active import Active, slot_for
from mezzo.torch.cache import keep_in_step
from mezzo.torch.casting import Device, device_for
from mezzo.torch.eager import runs_eagerly
from mezzo.torch.ops import NUMBERS, OpSpec, autocast_key_name, op_spec, with_tensors
from mezzo.torch.plans import FUSED_LAYER, Plan, Served, build_plan, native_rules
from mezzo.torch.probing import Repairer, probe_while_tracing
from mezzo.torch.repairs import DTYPE_ERRORS, Repair, Run, inside
from mezzo.torch.switch import KEY, KEY_NAME
from mezzo.torch.tokens import IN_GRAPH
from mezzo.torch.watching import make_watching_kernel, repair_of_watched

__all__ = ["foreign_kernels", "install", "installed_kernels", "serve_all"]

_lock = threading.Lock()
_installed: dict[tuple[str, str], Callable[..., Any]] = {}
_displaced: set[tuple[str, str]] = set()
_watched: set[str] = set()
_libraries: dict[str, torch.library.Library] = {}


def install(plan: Plan) -> None:
    """Register the kernels that a plan needs and that are not there yet.

    Args:
        plan: The plan; nothing happens for an empty one.
    """
    missing = [op for op in plan.ops if (plan.device, op) not in _installed]
    unwatched = plan.watched - _watched
    if missing or unwatched:
        with _lock:
            if unwatched or plan.device != torch._C._get_privateuse1_backend_name():
                # On an accelerator that is plugged in, it is early enough when the first cast is kept: until then a
                # program that does not use it pays nothing for it.
                keep_in_step()
            _register(missing, device_for(plan.device))
            _watch(unwatched)


def _watch(ops: Iterable[str]) -> None:
    for op in ops:
        spec = op_spec(op)
        if spec is None or op in _watched:
            continue
        # One kernel for all devices, whose tables differ.
        lower_on = frozenset(
            device for device in tables.devices() if native_rules(device).get(op) is CastPolicy.LOWER_PRECISION_FP
        )
        call = call_of(spec)
        kernel, with_keyset = make_watching_kernel(spec, call, lower_on)
        namespace, _, name = op.partition("::")
        _library(namespace).impl(name, kernel, KEY_NAME, with_keyset=with_keyset)
        if op != FUSED_LAYER:
            probe_while_tracing(spec, KEY, partial(repair_of_watched, spec, call))
        _watched.add(op)


def installed_kernels(device_type: str) -> frozenset[str]:
    """Name the ops for which mezzo has registered a kernel on a device in this process."""
    return frozenset(op for device, op in _installed if device == device_type)


def foreign_kernels(ops: Iterable[str], device_type: str) -> frozenset[str]:
    """Find the ops that have an autocast kernel on a device that is not mezzo's, or had one before mezzo's.

    Args:
        ops: Canonical names.
        device_type: The device type.
    """
    key_name = autocast_key_name(device_type)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(
        op
        for op in ops
        if (device_type, op) in _displaced
        or ((device_type, op) not in _installed and op_spec(op) is not None and has_kernel(op, key_name))
    )


def _register(ops: Iterable[str], device: Device) -> None:
    with warnings.catch_warnings():
        # PyTorch says once per process that a kernel is overridden. That is what a policy asks for, so just this one is
        # not shown.
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        for op in ops:
            spec = op_spec(op)
            if spec is None or (device.type, op) in _installed:
                continue
            kernel = _with_tensors(spec, _make_kernel(spec, device))
            namespace, _, name = op.partition("::")
            _library(namespace).impl(
                name, kernel, autocast_key_name(device.type), with_keyset=True, allow_override=True
            )
            probe_while_tracing(spec, device.key, _repairer(spec, device))
            _installed[device.type, op] = kernel


def _library(namespace: str) -> torch.library.Library:
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return library


def _make_kernel(spec: OpSpec, device: Device) -> Callable[..., Any]:
    name = spec.name
    slot = slot_for(device.type)
    unplanned = _unplanned(spec, device)
    past_key = _past_key(spec, device)
    device_type, key = device.type, device.key
    region_dtype = torch.get_autocast_dtype
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    float16 = torch.float16

    @runs_eagerly
    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # `slot.active` is what `slot.current()` finds first; asked here to save the call.
        plan = ((slot.active if not IN_GRAPH else None) or slot.current()).plan
        low_dtype = region_dtype(device_type)
        served = unplanned
        if plan is not None:
            served = (plan.bfloat16 if low_dtype is not float16 else plan.float16).get(name, unplanned)
        action = served.action
        if served.repair is not None:
            return _mended(served.repair, run_by(action, keyset, low_dtype), args, kwargs)
        if action is None:
            return past_key(keyset, *args, **kwargs)
        exclude(key, True)
        try:
            return action(args, kwargs, low_dtype)
        finally:
            exclude(key, False)

    @runs_eagerly
    def run_by(action: Action | None, keyset: torch._C.DispatchKeySet, low_dtype: torch.dtype) -> Run:
        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if action is None:
                inside.depth += 1
                try:
                    return past_key(keyset, *args, **kwargs)
                finally:
                    inside.depth -= 1
            exclude(key, True)
            try:
                return action(args, kwargs, low_dtype)
            finally:
                exclude(key, False)

        return run

    return kernel


@runs_eagerly
def _mended(repair: Repair, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return run(args, kwargs)
    except DTYPE_ERRORS as error:
        if inside.depth:
            raise
        fault = error
    return repair.mend(fault, run, args, kwargs)


def _repairer(spec: OpSpec, device: Device) -> Repairer:
    slot = slot_for(device.type)

    def repairer(*_: Any) -> tuple[Repair, CastPolicy | None] | None:
        plan = slot.current().plan
        if plan is None:
            return None
        low_dtype = torch.get_autocast_dtype(device.type)
        served = (plan.float16 if low_dtype is torch.float16 else plan.bfloat16).get(spec.name)
        return None if served is None or served.repair is None else (served.repair, served.rule)

    return repairer


def _unplanned(spec: OpSpec, device: Device) -> Served:
    """Give what is done with an op on which the policy and PyTorch agree: what PyTorch would do.

    PyTorch's own kernel can be kept aside when it is overridden, but not be called safely: that call holds the GIL while the
    kernel waits for the lock of the weight cache, and whoever empties the cache holds that lock and waits for the GIL. So
    the rule that the device's table has for the op is applied by mezzo's own action. Only a kernel of which no table
    tells the rule has to be called; with the weight cache off, it does not ask for that lock.
    """
    own = native_rules(device.type).get(spec.name)
    if own is not None:
        return Served(spec.name, own, action_for(own, spec, device, "torch"))
    key_name = autocast_key_name(device.type)
    # Asked first: a call of a kernel that is not there is an internal error of PyTorch's.
    if not torch._C._dispatch_has_kernel_for_dispatch_key(spec.name, key_name):
        return Served(spec.name, None, None)
    _displaced.add((device.type, spec.name))
    kept = torch.library.get_kernel(spec.overload, device.key).call_boxed
    keyset = torch._C.DispatchKeySet(device.key)

    def call_kept(args: tuple[Any, ...], kwargs: dict[str, Any], _: torch.dtype) -> Any:
        cache_enabled = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return kept(keyset, *args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(cache_enabled)

    return Served(spec.name, None, call_kept)


def _past_key(spec: OpSpec, device: Device) -> Callable[..., Any]:
    redispatch = spec.overload.redispatch
    call = spec.overload
    after, key = device.past_key, device.key
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    takes_numbers = spec.takes_numbers

    def past_key(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if takes_numbers and not all(isinstance(arg, torch.Tensor) for arg in args[:2]):
            # A redispatch does not take a number for a tensor, a call does. Elementwise ops: nothing inside to be cast.
            exclude(key, True)
            try:
                return call(*args, **kwargs)
            finally:
                exclude(key, False)
        return redispatch(keyset & after, *args, **kwargs)

    return past_key


def _with_tensors(spec: OpSpec, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Let a kernel have tensors where it needs them, also where PyTorch hands over the number that one stood for."""
    places = [index for index, _ in spec.tensors]
    if len(places) < 2 or spec.takes_numbers:
        return kernel

    @runs_eagerly
    def kernel_with_tensors(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if any(args[place].__class__ in NUMBERS for place in places if place < len(args)):
            args = with_tensors(args, places)
        return kernel(keyset, *args, **kwargs)

    return kernel_with_tensors


@contextmanager
def serve_all(device_type: str) -> Iterator[Plan]:
    """Let mezzo's kernels serve every op of a device's table in this thread, also where PyTorch's would do the same.

    This is how the tests and benchmarks hold mezzo's kernels against PyTorch's; there is no reason to use it otherwise.
    Regions that are entered inside replace it for their length.

    Args:
        device_type: The device.

    Yields:
        The plan.
    """
    slot = slot_for(device_type)
    policy = slot.current().policy
    plan = build_plan(policy, device_type, serve="all")
    install(plan)
    before = slot.enter(Active(policy, plan))
    try:
        yield plan
    finally:
        slot.leave(before)
