"""`capture`, `restore` and `bind`: carrying the state of autocast to where a call is made later.

PyTorch's flags and a region's policy belong to a thread and to the time that the region is open. Code that runs a function
again, or in another thread, takes the state along here: checkpointing, pools of workers, replicas of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Literal, TypeVar

import torch

from mezzo.errors import RegionError
from mezzo.policy import Policy
from mezzo.torch.active import Slot, slot_for
from mezzo.torch.autocast import autocast
from mezzo.torch.decorating import run_in
from mezzo.torch.eager import runs_eagerly
from mezzo.torch.policies import follow_default
from mezzo.torch.tokens import DEVICES as STAND_INS

__all__ = ["AutocastState", "DeviceState", "bind", "capture"]

F = TypeVar("F", bound=Callable[..., Any])

_DEVICES = ("cuda", "xpu", "mps", "mtia", "hpu", "ipu", "maia", "xla")

_NOT_ENTERED = (
    "AutocastState.restore().__exit__() was called in a thread that has not entered it; use it in a `with` statement, or "
    "call __enter__() and __exit__() in pairs in one thread."
)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The state of autocast on one device.

    Attributes:
        device_type: The device type.
        enabled: Whether autocast is on.
        dtype: The lower-precision dtype.
        policy: What an open region of mezzo's has put in force; None outside any and in a plain ``torch.autocast`` region,
            where what `mezzo.torch.set_default_policy` has set, or PyTorch, rules.
    """

    device_type: str
    enabled: bool
    dtype: torch.dtype
    policy: Policy | None


@dataclass(frozen=True, slots=True)
class AutocastState:
    """The state of autocast in a thread, as `capture` found it: a value, equal to another if all parts are.

    It can be kept, handed to other threads, and pickled.

    Attributes:
        devices: The state of the CPU, of the current accelerator, and of each other device on which autocast is on or a
            policy in force.
        cache_enabled: Whether the casts of weights are kept for the length of a region.
    """

    devices: tuple[DeviceState, ...]
    cache_enabled: bool

    def restore(self) -> AbstractContextManager[None]:
        """Put the state in force for a while, whatever is in force around.

        Like a region it counts as one: when a thread leaves the outermost, its casts of weights go.

        Returns:
            A context manager. It may be entered more than once, also while it is open and in several threads at a time.

        Example:
            >>> import torch
            >>> from mezzo.torch import autocast, capture
            >>> with autocast("cpu", dtype=torch.bfloat16):
            ...     state = capture()
            >>> with state.restore():
            ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            torch.bfloat16
        """
        return _Restored(self)


@runs_eagerly
def capture() -> AutocastState:
    """Take down the state of autocast in this thread, the policy of its regions included.

    Returns:
        The state, to be restored later or elsewhere. Outside of any region that is one in which nothing is cast.

    Example:
        >>> import torch
        >>> from mezzo.torch import autocast, capture
        >>> with autocast("cpu", dtype=torch.float16, policy="unified"):
        ...     found = capture().devices[0]
        >>> found.device_type, found.enabled, found.dtype, found.policy.name
        ('cpu', True, torch.float16, 'unified')
    """
    accelerator = torch.accelerator.current_accelerator()
    always = {"cpu", None if accelerator is None else accelerator.type}
    devices = dict.fromkeys(("cpu", *_DEVICES, torch._C._get_privateuse1_backend_name()))
    found = []
    for device in devices:
        if not torch.amp.is_autocast_available(device):
            continue
        policy, enabled = _policy(slot_for(device)), torch.is_autocast_enabled(device)
        # That a stand-in is on says which policy another device has, and follows when that one is restored.
        if device in always or policy is not None or (enabled and device not in STAND_INS):
            found.append(DeviceState(device, enabled, torch.get_autocast_dtype(device), policy))
    return AutocastState(tuple(found), torch.is_autocast_cache_enabled())


def bind(fn: F) -> F:
    """Bind a function to the state of autocast that is in force now: each later call runs in that state.

    For what is called when the region is over, or in a thread that has not entered it: the function that checkpointing runs
    again, the work of a pool, the replicas of a module. Enabled flag, dtype, cache flag and policy are carried. Gradients
    being on or off, and the default dtype, are not.

    Args:
        fn: A callable. Of a generator function, a coroutine function or an asynchronous generator function each step runs in
            the state, as under a decorator.

    Returns:
        A function of the same kind, to be called in any thread; ``functools.wraps`` is applied.

    Raises:
        TypeError: ``fn`` cannot be called.

    Example:
        >>> import torch
        >>> from torch.utils.checkpoint import checkpoint
        >>> from mezzo.torch import autocast, bind
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
        >>> with autocast("cpu", dtype=torch.bfloat16, policy="unified"):
        ...     loss = checkpoint(bind(net), torch.ones(2, 4), use_reentrant=False).sum()
        >>> loss.backward()  # runs the net again, under the policy "unified"
    """
    if not callable(fn):
        msg = (
            f"bind(fn) requires a callable, got {type(fn).__name__}. Give it the function that is to be called later, not "
            "what it returns."
        )
        raise TypeError(msg)
    return run_in(capture().restore(), fn)


class _Restored:
    """Puts a state in force. What an entry found is kept per entry and thread, as a region does it."""

    def __init__(self, state: AutocastState) -> None:
        self._regions = [_region(device, state.cache_enabled) for device in state.devices]
        self._plain = [slot_for(device.device_type) for device in state.devices if device.policy is None]
        self._entries: dict[int, list[ExitStack]] = {}

    @runs_eagerly
    def __enter__(self) -> None:
        with ExitStack() as stack:  # so that nothing stays in force if a part cannot be entered
            for region in self._regions:
                stack.enter_context(region)
            for slot in self._plain:
                stack.enter_context(_without_policy(slot))
            self._entries.setdefault(get_ident(), []).append(stack.pop_all())

    @runs_eagerly
    def __exit__(self, *exc_info: object) -> Literal[False]:
        entries = self._entries.get(get_ident())
        if not entries:
            raise RegionError(_NOT_ENTERED)
        entries.pop().close()
        return False


def _region(device: DeviceState, cache_enabled: bool) -> autocast:
    policy = "torch" if device.policy is None else device.policy
    # The constructor would disable, with a warning, what it takes for a mistake. This is a state that was in force.
    region = autocast(
        device.device_type, dtype=torch.float16, enabled=False, cache_enabled=cache_enabled, policy=policy
    )
    region._enabled, region.fast_dtype = device.enabled, device.dtype
    return region


def _policy(slot: Slot) -> Policy | None:
    """Give the policy that a region has put in force in this thread, or in the one whose backward pass this thread runs."""
    active = slot.active or slot._carried()
    if active is None or (slot.active is None and active.policy is slot.default.policy):
        return None
    return active.policy


@contextmanager
def _without_policy(slot: Slot) -> Iterator[None]:
    """Have no region's policy in force, so that the process-wide default rules and regions inside start from it."""
    follow_default(slot)
    before = slot.enter(slot.default)
    slot.active, outer = None, slot.outer
    try:
        yield
    finally:
        slot.outer = outer
        slot.leave(before)
