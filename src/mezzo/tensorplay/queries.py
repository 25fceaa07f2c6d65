"""TensorPlay's own functions around autocast, while a region of mezzo's is open: they tell, and set, what is in force.

A thread that is in no region of mezzo's gets TensorPlay's own answer. A native ``tensorplay.autocast`` region entered
inside one of mezzo's, such as a library's ``enabled=False``, sets mezzo's state: it is obeyed, and follows mezzo's policy.
The functions are found where they are looked up; one that a module took by name before (``from tensorplay import
is_autocast_enabled``) goes on to tell TensorPlay's own state, which is off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorplay
from tensorplay.amp import autocast_mode

from mezzo.tensorplay.choke_points import replace_while_open
from mezzo.tensorplay.places import Place
from mezzo.tensorplay.state import NATIVE, Snapshot, ThreadState, thread_state

__all__ = ["get_autocast_dtype", "is_autocast_enabled", "is_cache_enabled", "watch_queries"]


def _is_autocast_enabled(state: ThreadState, device_type: str = "cuda") -> bool:
    return state.now.devices[device_type].enabled


def _set_autocast_enabled(state: ThreadState, device_type: str, enabled: bool) -> None:
    state.set(device_type, enabled=bool(enabled))


def _get_autocast_dtype(state: ThreadState, device_type: str = "cuda") -> Any:
    return state.now.devices[device_type].dtype


def _set_autocast_dtype(state: ThreadState, device_type: str, dtype: Any) -> None:
    if not isinstance(dtype, tensorplay.DType):
        raise TypeError
    state.set(device_type, dtype=dtype)


def _get_autocast_cpu_dtype(state: ThreadState) -> Any:
    return state.now.devices["cpu"].dtype


def _get_autocast_gpu_dtype(state: ThreadState) -> Any:
    return state.now.devices["cuda"].dtype


def _is_autocast_cache_enabled(state: ThreadState) -> bool:
    return state.now.cache_enabled


def _set_autocast_cache_enabled(state: ThreadState, enabled: bool) -> None:
    state.put(state.now._replace(cache_enabled=bool(enabled)))


def _clear_autocast_cache(state: ThreadState) -> None:
    state.forget_casts()


class _Before(tuple[Any, ...]):
    """What a native region has found: in form what TensorPlay would take back if mezzo's region has ended by then."""

    snapshot: Snapshot


def _enter_native_region(state: ThreadState, device: str, dtype: Any, enabled: bool, cache_enabled: bool) -> _Before:
    before = _Before((False, NATIVE.dtype(device), NATIVE.is_cache_enabled()))
    before.snapshot = state.now
    state.set(device, cache_enabled, enabled=enabled, dtype=dtype)
    return before


def _leave_native_region(state: ThreadState, _device: str, before: _Before) -> None:
    state.put(before.snapshot)


def is_autocast_enabled(device_type: str) -> bool:
    """Say whether autocast is on in this thread, by a region of mezzo's or of TensorPlay's.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        True or False. ``tensorplay.is_autocast_enabled`` says the same when it is looked up in the region.

    Raises:
        ValueError: TensorPlay has no autocast for the device type.

    Example:
        >>> is_autocast_enabled("cpu")
        False
    """
    device = thread_state().now.devices.get(device_type)
    return bool(NATIVE.is_enabled(device_type)) if device is None else device.enabled


def get_autocast_dtype(device_type: str) -> Any:
    """Give the dtype of autocast in this thread: the open region's, or the one that a region takes by default.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        A dtype of TensorPlay's. ``tensorplay.get_autocast_dtype`` says the same when it is looked up in the region.

    Raises:
        ValueError: TensorPlay has no autocast for the device type.

    Example:
        >>> print(get_autocast_dtype("cpu"))
        tensorplay.bfloat16
    """
    device = thread_state().now.devices.get(device_type)
    return NATIVE.dtype(device_type) if device is None else device.dtype


def is_cache_enabled() -> bool:
    """Say whether casts of weights are kept in this thread."""
    state = thread_state()
    return state.now.cache_enabled if state.depth else bool(NATIVE.is_cache_enabled())


_INSTEAD: dict[str, Callable[..., Any]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        _is_autocast_enabled,
        _set_autocast_enabled,
        _get_autocast_dtype,
        _set_autocast_dtype,
        _get_autocast_cpu_dtype,
        _get_autocast_gpu_dtype,
        _is_autocast_cache_enabled,
        _set_autocast_cache_enabled,
        _clear_autocast_cache,
    )
}
_REGIONS: dict[str, Callable[..., Any]] = {"_fused_enter": _enter_native_region, "_fused_exit": _leave_native_region}


def watch_queries() -> None:
    """Have the functions replaced whenever a region is open; called once, when the adapter is imported."""
    for holder in (tensorplay, tensorplay._C, tensorplay.amp, autocast_mode):
        for name, instead in _INSTEAD.items():
            if name in vars(holder):
                replace_while_open(Place(holder, name, name), functools.partial(_replacement, instead))
    for name, instead in _REGIONS.items():
        replace_while_open(Place(autocast_mode, name, name), functools.partial(_region_replacement, instead))
        native_name = name.replace("fused", "autocast")
        replace_while_open(Place(tensorplay._C, native_name, name), functools.partial(_region_replacement, instead))


def _replacement(instead: Callable[..., Any], _name: str, function: Any) -> Any:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        state = thread_state()
        if state.depth == 0:
            return function(*args, **kwargs)
        try:
            return instead(state, *args, **kwargs)
        except (KeyError, TypeError):
            return function(*args, **kwargs)  # which raises, and says what is wrong with the arguments

    return functools.update_wrapper(replacement, function)


def _region_replacement(instead: Callable[..., Any], _name: str, function: Any) -> Any:
    """Tell a native region that was entered inside one of mezzo's by what it has found."""

    def replacement(device: str, *rest: Any) -> Any:
        state = thread_state()
        if state.depth == 0:
            return function(device, *rest)
        if len(rest) == 1 and not isinstance(rest[0], _Before):
            result = function(device, *rest)
            state.native_ended(device)
            return result
        return instead(state, device, *rest)

    return functools.update_wrapper(replacement, function)
