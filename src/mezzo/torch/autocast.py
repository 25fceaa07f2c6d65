"""The autocast region: PyTorch's own autocast state, and on top of it the policy that mezzo's kernels follow.

Enabled flag, dtype, cache flag and nesting are PyTorch's, so checkpointing, RNNs, attention fast paths and third-party code
see the truth. What a region changes is kept per entry, not on the instance, so one instance may be entered twice, from a
recursive function or from several threads.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from threading import get_ident
from typing import Any, Literal, TypeVar, cast

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.compiler import is_dynamo_compiling

from mezzo.builtin import PolicyLike
from mezzo.errors import RegionError
from mezzo.policy import Policy
from mezzo.torch.active import Active, Found, slot_for
from mezzo.torch.backends import follow_default_dtype
from mezzo.torch.cache import forget_native_casts
from mezzo.torch.decorating import decorate
from mezzo.torch.eager import not_compiled_alone
from mezzo.torch.graphs import enter_in_graph, leave_in_graph
from mezzo.torch.policies import active_for, follow_default, region_default
from mezzo.torch.tokens import THREAD

__all__ = ["autocast", "is_autocast_available"]

F = TypeVar("F", bound="Callable[..., Any] | classmethod[Any, Any, Any]")

_Entry = tuple[bool, bool, torch.dtype, Found]
"""What one entry of a region found: cache flag, enabled flag, dtype and policy."""

_OF_THE_PROCESS = frozenset({"_slot", "_active", "_entries", "_traced"})
"""Attributes that a copy of a region finds or makes anew."""

_NOT_ENTERED = (
    "autocast.__exit__() was called in a thread that has not entered this region; use it in a `with` statement, or call "
    "__enter__() and __exit__() in pairs in one thread."
)

# A look-up each saved; entering a region is to cost no more than it must.
_dtype_of, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_is_cache_enabled, _set_cache_enabled = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_increment, _decrement = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_is_function_mode_on = torch._C._is_torch_function_mode_enabled

_LOW = (torch.bfloat16, torch.float16)
# Device types for which PyTorch's constructor checks nothing but the dtype, so that need not be asked each time.
_PLAIN = frozenset({"cpu", "xpu", "mps", "mtia", "hpu", "maia"})


def is_autocast_available(device_type: str) -> bool:
    """Say whether there is autocast for a device type. Thread-safe.

    Args:
        device_type: A device type such as ``"cuda"``.

    Returns:
        True if PyTorch has an autocast dispatch key for it; whether such a device is there is another question.

    Raises:
        RuntimeError: The string is no device type.

    Example:
        >>> is_autocast_available("cpu"), is_autocast_available("meta")
        (True, False)
    """
    return bool(torch.amp.is_autocast_available(device_type))


class autocast:  # noqa: N801 - PyTorch's name
    """A region, or the decorator of a function, in which listed ops run in the dtype that a policy gives them.

    Takes the place of ``torch.autocast``: same arguments, same state, same texts of errors and warnings. Beyond it there are
    ``policy=``, ``device_type="auto"``, and instances that may be entered again while they are open.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"xpu"``, ``"mps"`` and so on, or ``"auto"``: the current accelerator, if there
            is one, and the CPU in one region.
        dtype: ``torch.bfloat16`` or ``torch.float16``. By default the device's current autocast dtype (float16 on CUDA,
            bfloat16 on CPU), read when the instance is made; with ``"auto"`` each device's own.
        enabled: False makes a region in which nothing is cast.
        cache_enabled: Whether the casts of weights are kept for the length of the region; by default as it is now.
        policy: Which op runs in which dtype: ``"default"`` (the device's own table, and repairs), ``"torch"`` (that table
            and nothing else), ``"unified"`` (one table for all devices), ``"fp32"`` (every listed op in float32),
            ``"apex-o1"`` (the lists of Apex's O1), a `mezzo.Policy`, or the path of a TOML file. Without it the region takes
            the policy of the region around it, else the process-wide default: ``"default"``, unless
            `mezzo.torch.set_default_policy` has set another.

    Raises:
        ValueError: ``device_type`` is not a string.
        RuntimeError: It is no device type or has no autocast, or the GPU lacks bfloat16.
        UnknownPolicyError: ``policy`` is a string that names no policy.
        UnknownOpError: The policy names an op that PyTorch does not have.
        PolicyFileError: The policy file has a wrong key or value.

    Warns:
        UserWarning: The device cannot autocast to ``dtype``, or CUDA is not there; the region is then disabled, as PyTorch's
            is.

    The state is the thread's: other threads do not see it, and a thread starts with none. A plain ``with`` around a
    ``yield`` or an ``await`` leaves it set while the generator or task is suspended, as PyTorch's does.

    Example:
        >>> import torch
        >>> from mezzo.torch import autocast
        >>> linear, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     print(linear(x).dtype, linear(x).softmax(-1).dtype)
        torch.bfloat16 torch.bfloat16
        >>> with autocast("cpu", dtype=torch.bfloat16, policy="unified"):
        ...     print(linear(x).dtype, linear(x).softmax(-1).dtype)
        torch.bfloat16 torch.float32
    """

    _inner: autocast | None = None
    _asked: tuple[Any, ...] | None = None

    @not_compiled_alone
    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: PolicyLike | None = None,
    ) -> None:
        self._traced: list[Any] = []
        if is_dynamo_compiling():
            self._asked = (device_type, dtype, enabled, cache_enabled, policy)
            return
        if not isinstance(device_type, str):
            msg = f"Expected `device_type` of type `str`, got: `{type(device_type)}`"
            raise ValueError(msg)  # PyTorch's own error for this
        if device_type == "auto":
            device_type, *rest = _auto_devices()
            self._inner = autocast(rest[0], dtype, enabled, cache_enabled, policy=policy) if rest else None
        if device_type in _PLAIN and (dtype is None or dtype in _LOW):
            self.fast_dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
            if enabled and self.fast_dtype not in _LOW:
                enabled, self.fast_dtype = _ask_torch(device_type, dtype, enabled)
        else:
            enabled, self.fast_dtype = _ask_torch(device_type, dtype, enabled)
        self.device = device_type
        self._enabled = bool(enabled)
        self._cache_enabled = torch.is_autocast_cache_enabled() if cache_enabled is None else bool(cache_enabled)
        self._set_policy(policy)
        self._entries: dict[int, list[_Entry]] = {}

    def _set_policy(self, policy: PolicyLike | None) -> None:
        # "cpu:0" is a spelling that PyTorch takes; policies go by type.
        plain_type = self.device.split(":", 1)[0]
        self._slot = slot_for(plain_type)
        self._active: Active | None = None
        if policy is None:
            follow_default(self._slot)
        else:
            self._active = active_for(policy, plain_type)

    @not_compiled_alone
    def __enter__(self) -> autocast:
        """Set the region's state in this thread."""
        if is_dynamo_compiling():
            enter_in_graph(self)
            return self
        device, fast_dtype = self.device, self.fast_dtype
        if _is_function_mode_on():
            self._show_to_export()
        dtype = _dtype_of(device)
        # First, for it is the one call that can fail: on something that is no dtype, of which the constructor only warns.
        if dtype is not fast_dtype:
            _set_dtype(device, fast_dtype)
        cache_enabled, enabled = _is_cache_enabled(), _is_enabled(device)
        before = self._slot.enter(self._active or region_default(self._slot))
        found = (cache_enabled, enabled, dtype, before)
        thread = get_ident()
        if thread in self._entries:
            self._entries[thread].append(found)
        else:
            self._entries[thread] = [found]
        _set_enabled(device, self._enabled)
        if _increment() > 1 and not before[1].is_watched:
            # The plain region around may have had weights cast, of which nothing is written down.
            forget_native_casts()
        if cache_enabled is not self._cache_enabled:
            _set_cache_enabled(self._cache_enabled)
        if self._inner is not None:
            self._inner.__enter__()
        return self

    @not_compiled_alone
    def __exit__(self, *exc_info: object) -> Literal[False]:
        """Restore what this thread's last entry found; exceptions go on.

        Raises:
            RegionError: This thread has not entered the region.
        """
        if is_dynamo_compiling():
            leave_in_graph(self)
            return False
        entries = self._entries.get(get_ident())
        if not entries:
            raise RegionError(_NOT_ENTERED)
        cache_enabled, enabled, dtype, before = entries.pop()
        if self._inner is not None:
            self._inner.__exit__(*exc_info)
        # As PyTorch's regions do: the casts of weights go when a thread leaves its outermost region.
        if _decrement() == 0:
            torch.clear_autocast_cache()
        device = self.device
        _set_enabled(device, enabled)
        # Always, for what is open inside may have changed them and not put them back.
        _set_dtype(device, dtype)
        _set_cache_enabled(cache_enabled)
        was_watched = THREAD.scope.is_watched
        self._slot.leave(before)
        if THREAD.scope.is_watched and not was_watched:
            # As on entry: in this region nothing was written down either.
            forget_native_casts()
        if _is_function_mode_on():  # under torch.export
            for mode in _export_modes():
                mode.__torch_function__(_exit_autocast, (), ())
        return False

    def parts(self) -> list[autocast]:
        """Give the regions of single devices that make up this one."""
        return [self] if self._inner is None else [self, self._inner]

    def _show_to_export(self) -> None:
        # torch.export records regions by seeing their entry and exit; no other mode is to know of them.
        for mode in _export_modes():
            self.check_export()
            arguments = (self.device, self.fast_dtype, self._enabled, self._cache_enabled)
            mode.__torch_function__(_enter_autocast, (), arguments)

    def check_export(self) -> None:
        """Raise if an exported program, which knows PyTorch's own regions alone, would compute other numbers in this one.

        Raises:
            RegionError: The policy changes rules. Repairs change no number of what works without them.
        """
        plan = None if self._active is None else self._active.plan
        if self._active is not None and plan is not None and (plan.bfloat16 or plan.float16):
            msg = (
                f"torch.export records a region as PyTorch's own, without its policy {self._active.policy.name!r}; give the "
                "region no policy, or export inside of it, and call run_decompositions() on the program there to have the "
                "casts in it."
            )
            raise RegionError(msg)

    def __call__(self, func: F) -> F:
        """Decorate a function, a method or a class.

        Args:
            func: Decides what runs in the region.

                * A function or another callable: each call.
                * A generator function, an asynchronous one, a coroutine function: each step of what it makes, and nothing
                  that runs between them: not the loop that consumes it, not another task.
                * A ``staticmethod`` or ``classmethod`` object: as the function in it.
                * A `torch.nn.Module` class: its ``forward``. Any other class: its construction. The class stays a class, and
                  what a subclass puts in the place of these methods is not decorated.

        Returns:
            For a class the same class; else what came, wrapped, of the same kind; ``functools.wraps`` is applied.

        Raises:
            TypeError: ``func`` cannot be called, or is a class that cannot be decorated.

        Example:
            >>> import torch
            >>> from mezzo.torch import autocast
            >>> @autocast("cpu", dtype=torch.bfloat16)
            ... class Square(torch.nn.Module):
            ...     def forward(self, x):
            ...         return x @ x
            >>> Square()(torch.ones(2, 2)).dtype
            torch.bfloat16
        """
        if not callable(func) and not isinstance(func, classmethod):
            msg = (
                f"autocast()(func) requires a callable, but got {type(func).__name__}. "
                f"Did you mean to use autocast as a context manager? For example:\n"
                f"    with mezzo.torch.autocast(device_type=...):\n"
                f"        output = model(input)"
            )
            raise TypeError(msg)
        return cast("F", decorate(self, func))

    @property
    def policy(self) -> Policy | None:
        """The policy that the region was given; None if it takes the one in force when it is entered."""
        return None if self._active is None else self._active.policy

    def __getstate__(self) -> dict[str, Any]:
        """Give what a copy or a pickle needs: the arguments, not what open entries have found."""
        kept = {name: value for name, value in vars(self).items() if name not in _OF_THE_PROCESS}
        return {**kept, "policy": self.policy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild a copy."""
        policy = state.pop("policy")
        self.__dict__.update(state)
        self._set_policy(policy)
        self._entries = {}
        self._traced = []

    def __repr__(self) -> str:
        policy = "" if self.policy is None else f", policy={self.policy.name!r}"
        return f"autocast({self.device!r}, dtype={self.fast_dtype}, enabled={self._enabled}{policy})"


def _ask_torch(device: str, dtype: torch.dtype | None, enabled: bool) -> tuple[bool, torch.dtype]:
    """Let PyTorch's constructor check the arguments: its errors and warnings, in its words.

    Its warnings are shown again from here, so that they point at the caller's line and not at mezzo's.
    """
    if dtype is None:
        follow_default_dtype(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checked = torch.autocast(device, dtype=dtype, enabled=enabled)
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=_callers_level())
    return checked._enabled, checked.fast_dtype


def _callers_level() -> int:
    """Count the frames from the function that asks up to the first one outside of mezzo."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("mezzo.torch"):
        level, frame = level + 1, frame.f_back
    return level


def _auto_devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and is_autocast_available(accelerator.type):
        return [accelerator.type, "cpu"]
    return ["cpu"]


def _export_modes() -> list[Any]:
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode  # noqa: PLC0415 - only under export

    stack = torch.overrides._get_current_function_mode_stack()
    return [mode for mode in stack if isinstance(mode, PreDispatchTorchFunctionMode)][:1]
