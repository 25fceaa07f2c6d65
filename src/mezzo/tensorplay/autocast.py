"""The autocast region, under the names and with the arguments that TensorPlay documents.

What a region changes is the calling thread's state, and what it found is kept per entry, not on the instance, so one
instance may be entered twice, from a recursive function or from several threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from threading import get_ident
from typing import Any, Literal, TypeVar, cast

import tensorplay
from tensorplay.amp import autocast_mode

from mezzo.builtin import PolicyLike
from mezzo.errors import DeviceError, DtypeError, RegionError
from mezzo.policy import Policy
from mezzo.tensorplay.choke_points import acquire, release
from mezzo.tensorplay.decorating import decorate
from mezzo.tensorplay.dtypes import LOW
from mezzo.tensorplay.kernels import wrap
from mezzo.tensorplay.plans import DEVICES, devices_here, ops_of
from mezzo.tensorplay.policies import get_default_policy, resolved
from mezzo.tensorplay.queries import get_autocast_dtype, is_cache_enabled
from mezzo.tensorplay.state import Snapshot, thread_state

__all__ = ["autocast", "autocast_decorator", "is_autocast_available"]

F = TypeVar("F", bound="Callable[..., Any] | classmethod[Any, Any, Any]")

_NOT_ENTERED = (
    "autocast.__exit__() was called in a thread that has not entered this region; use it in a `with` statement, or call "
    "__enter__() and __exit__() in pairs in one thread."
)


def is_autocast_available(device_type: str) -> bool:
    """Say whether there is autocast for a device type. Thread-safe.

    Args:
        device_type: A device type such as ``"cuda"``; TensorPlay's documentation names cuda, cpu, mtia, maia, xpu and hpu.

    Returns:
        True if this build of TensorPlay has it; whether such a device is there is another question.

    Raises:
        ValueError: ``device_type`` is not a string.

    Example:
        >>> is_autocast_available("cpu"), is_autocast_available("xpu")
        (True, False)
    """
    _check_string(device_type)
    return bool(autocast_mode.is_autocast_available(device_type))


class autocast:  # noqa: N801 - TensorPlay's name
    """A region, or the decorator of a function, in which listed ops run in the dtype that a policy gives them.

    Takes the place of ``tensorplay.autocast``: same arguments, same texts of errors and warnings. Beyond it there are
    ``policy=`` and instances that may be entered again while they are open.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        dtype: ``tensorplay.bfloat16`` or ``tensorplay.float16``. By default what ``tensorplay.get_autocast_dtype`` gives for
            the device (float16 on CUDA, bfloat16 on CPU), read when the instance is made.
        enabled: False makes a region in which nothing is cast.
        cache_enabled: Whether the casts of large weights are kept for the length of the outermost region; by default as it
            is now.
        policy: Which op runs in which dtype: ``"default"`` (the package's table for the device, and repairs),
            ``"tensorplay"`` (that table and nothing else), ``"unified"`` (PyTorch's table, the same on each device),
            ``"fp32"`` (every listed op in float32), a `mezzo.Policy`, or the path of a TOML file. Without it the region
            takes the policy of the region around it, else the process-wide default: ``"default"``, unless
            `mezzo.tensorplay.set_default_policy` has set another.

    Raises:
        ValueError: ``device_type`` is not a string.
        RuntimeError: This build of TensorPlay has no autocast for the device (`mezzo.errors.DeviceError`), ``dtype`` is no
            dtype of TensorPlay's (`mezzo.errors.DtypeError`), or the GPU lacks bfloat16.
        UnknownPolicyError: ``policy`` is a string that names no policy.
        UnknownOpError: The policy names an op that TensorPlay does not have.
        PolicyFileError: The policy file has a wrong key or value.

    Warns:
        UserWarning: The device cannot autocast to ``dtype``, or CUDA is not there; the region is then disabled, as
            TensorPlay's is.

    The state is the thread's: other threads do not see it, and a thread starts with none. A plain ``with`` around a
    ``yield`` or an ``await`` leaves it set while the generator or task is suspended. Backward passes compute in a region as
    they do outside.

    Example:
        >>> import tensorplay
        >>> from mezzo.tensorplay import autocast
        >>> linear, x = tensorplay.nn.Linear(4, 4), tensorplay.ones(2, 4)
        >>> with autocast("cpu", dtype=tensorplay.bfloat16):
        ...     print(linear(x).dtype, tensorplay.softmax(linear(x), -1).dtype)
        tensorplay.bfloat16 tensorplay.bfloat16
        >>> with autocast("cpu", dtype=tensorplay.bfloat16, policy="unified"):
        ...     print(linear(x).dtype, tensorplay.softmax(linear(x), -1).dtype)
        tensorplay.bfloat16 tensorplay.float32
    """

    def __init__(
        self,
        device_type: str,
        dtype: Any | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: PolicyLike | None = None,
    ) -> None:
        _check_device(device_type)
        self.device = device_type
        self.fast_dtype = get_autocast_dtype(device_type) if dtype is None else dtype
        _check_dtype(self.fast_dtype)
        self._enabled = _can_enable(device_type, self.fast_dtype) if enabled else False
        self._cache_enabled = is_cache_enabled() if cache_enabled is None else bool(cache_enabled)
        self._policy = None if policy is None else resolved(policy)
        self._entries: dict[int, list[tuple[Snapshot, frozenset[str]]]] = {}

    def __enter__(self) -> autocast:
        """Set the region's state in this thread."""
        state, default = thread_state(), get_default_policy()
        around = state.now.devices[self.device].policy if state.depth else default
        policy = self._policy or around
        ops = ops_of(policy, devices_here())
        acquire(ops, wrap)
        before = state.open(default)
        state.set(self.device, self._cache_enabled, enabled=self._enabled, dtype=self.fast_dtype, policy=policy)
        self._entries.setdefault(get_ident(), []).append((before, ops))
        return self

    def __exit__(self, *exc_info: object) -> Literal[False]:
        """Restore what this thread's last entry found; exceptions go on.

        Raises:
            RegionError: This thread has not entered the region.
        """
        thread = get_ident()
        entries = self._entries.get(thread)
        if not entries:
            raise RegionError(_NOT_ENTERED)
        before, ops = entries.pop()
        if not entries:
            del self._entries[thread]
        thread_state().close(before)
        release(ops)
        return False

    def __call__(self, func: F) -> F:
        """Decorate a function, a method or a class.

        Args:
            func: Decides what runs in the region.

                * A function or another callable: each call.
                * A generator function, an asynchronous one, a coroutine function: each step of what it makes, and nothing
                  that runs between them.
                * A ``staticmethod`` or ``classmethod`` object: as the function in it.
                * A `tensorplay.nn.Module` class: its ``forward``. Any other class: its construction.

        Returns:
            For a class the same class; else what came, wrapped, of the same kind; ``functools.wraps`` is applied.

        Raises:
            TypeError: ``func`` cannot be called, or is a class that cannot be decorated.

        Example:
            >>> import tensorplay
            >>> from mezzo.tensorplay import autocast
            >>> @autocast("cpu", dtype=tensorplay.bfloat16)
            ... class Square(tensorplay.nn.Module):
            ...     def forward(self, x):
            ...         return x @ x
            >>> print(Square()(tensorplay.ones(2, 2)).dtype)
            tensorplay.bfloat16
        """
        if not callable(func) and not isinstance(func, classmethod):
            msg = (
                f"autocast()(func) requires a callable, but got {type(func).__name__}. "
                f"Did you mean to use autocast as a context manager? For example:\n"
                f"    with mezzo.tensorplay.autocast(device_type=...):\n"
                f"        output = model(input)"
            )
            raise TypeError(msg)
        return cast("F", decorate(self, func))

    @property
    def policy(self) -> Policy | None:
        """The policy that the region was given; None if it takes the one in force when it is entered."""
        return self._policy

    def __getstate__(self) -> dict[str, Any]:
        """Give what a copy or a pickle needs: the arguments, not what open entries have found."""
        name = next(name for name, dtype in _dtypes().items() if dtype == self.fast_dtype)
        return {**vars(self), "fast_dtype": name, "_entries": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild a copy."""
        self.__dict__.update(state, fast_dtype=_dtypes()[state["fast_dtype"]], _entries={})

    def __repr__(self) -> str:
        policy = "" if self._policy is None else f", policy={self._policy.name!r}"
        return f"autocast({self.device!r}, dtype={self.fast_dtype}, enabled={self._enabled}{policy})"


def autocast_decorator(autocast_instance: Any, func: F) -> F:
    """Decorate a function with a region; ``autocast_instance(func)`` does the same.

    Args:
        autocast_instance: A region of mezzo's, or one of TensorPlay's own.
        func: What `autocast.__call__` takes.

    Returns:
        The decorated function.

    Raises:
        TypeError: The first is no region, or the second cannot be called.

    Example:
        >>> import tensorplay
        >>> from mezzo.tensorplay import autocast, autocast_decorator
        >>> square = autocast_decorator(autocast("cpu"), lambda x: x @ x)
        >>> print(square(tensorplay.ones(2, 2)).dtype)
        tensorplay.bfloat16
    """
    if not (hasattr(autocast_instance, "__enter__") and hasattr(autocast_instance, "__exit__")):
        msg = f"autocast_decorator takes a region such as autocast('cpu') first, got {autocast_instance!r:.80}."
        raise TypeError(msg)
    return autocast.__call__(autocast_instance, func)


def _dtypes() -> dict[str, Any]:
    return {name: value for name, value in vars(tensorplay).items() if isinstance(value, tensorplay.DType)}


def _check_string(device_type: object) -> None:
    if not isinstance(device_type, str):
        msg = f"Expected `device_type` of type `str`, got: `{type(device_type)}`"
        raise ValueError(msg)  # TensorPlay's own error for this


def _check_device(device_type: object) -> None:
    _check_string(device_type)
    if device_type not in DEVICES:
        msg = (
            f"User specified an unsupported autocast device_type '{device_type}'. This build of TensorPlay has autocast for "
            f"{' and '.join(DEVICES)}; ask mezzo.tensorplay.is_autocast_available(device_type) first, or pass the type "
            "of the device that the model is on, such as x.device.type."
        )
        raise DeviceError(msg)


def _check_dtype(dtype: object) -> None:
    if not isinstance(dtype, tensorplay.DType):
        msg = f"dtype must be a dtype of TensorPlay, got {dtype!r}; allowed are tensorplay.bfloat16 and tensorplay.float16."
        raise DtypeError(msg)


def _can_enable(device: str, dtype: Any) -> bool:
    """Say whether a region can be enabled; if not, warn or raise as TensorPlay does, at the line of the caller."""
    if device == "cpu" and dtype in LOW.values():
        return True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checked = autocast_mode.autocast(device, dtype=dtype)
    for warning in caught:
        warnings.warn(warning.message, stacklevel=3)
    return bool(checked._enabled)
