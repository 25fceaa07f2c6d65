"""The regions of O1: which threads have entered them, and how they are entered, repaired and left.

O1 of Apex patched PyTorch for the whole process. Here it is an autocast region that is entered and left open: in the
thread that starts it, and in every thread that calls a model which `mezzo.apex.amp` watches. Threads that only load data
never enter it.

The casts of weights are kept only while a watched model's ``forward`` runs (`mezzo.apex.amp.watched_models`). A region that
never ends would otherwise keep them for good, and PyTorch does not see all ways of changing a weight: ``p.data.copy_()``
leaves no trace on ``p``.
"""

from __future__ import annotations

import os
import threading

import torch

from mezzo.apex.amp.cast_state import HERE, PROCESS, Started, drop_dead, nesting
from mezzo.torch.autocast import autocast
from mezzo.torch.eager import runs_eagerly
from mezzo.torch.switch import DEVICE as SWITCH
from mezzo.torch.switch import include
from mezzo.torch.tokens import _USUAL, DEVICES, THREAD

__all__ = ["begin", "end", "ensure_here", "is_settled"]

_increment, _decrement = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled


def begin(new: Started) -> None:
    """Start O1 in the process, and enter it in this thread; ends an earlier one.

    Args:
        new: What to start.

    Raises:
        RuntimeError: There is no autocast on a device; what was on stays on.
    """
    new.regions()  # whatever is wrong with them, the earlier ones are still there
    end()
    if not PROCESS.watches_forks and hasattr(os, "register_at_fork"):
        PROCESS.watches_forks = True
        os.register_at_fork(after_in_child=_leave_after_fork)
    PROCESS.started = new
    ensure_here()


def end() -> None:
    """End O1: now in this thread, and in others when they ask next."""
    PROCESS.started = None
    if HERE.started is not None:
        _leave()


@runs_eagerly
def ensure_here() -> None:
    """Have this thread in the regions of O1 if it is on, and not in them if it is off.

    Cheap where nothing is to do. What a step that raised has left off is turned on again. While casts are off, and in a
    backward pass, nothing is entered; where casts were off, the thread enters as soon as they are on again.
    """
    here = HERE
    if here.switched or here.forwards:
        drop_dead()
    if is_settled():
        return
    wanted = PROCESS.started
    if here.switched:
        here.is_late = True
    # A thread of autograd's has what it was given for the length of a pass, and nothing else.
    elif torch._C._current_graph_task_id() == -1:
        if here.started is not None:
            _leave()
        if wanted is not None:
            _enter(wanted)


def is_settled() -> bool:
    """Say whether this thread is in the regions that it is to be in, and in their state or one that was set inside of them.

    It is not where a region around them has ended, which has put back what it had found. And what is entered in the course
    of a call of compiled code is undone by PyTorch at its end, without a word to anybody.
    """
    here = HERE
    if here.started is not PROCESS.started:
        return False
    if here.started is None:
        return True
    now = nesting()
    if now != here.nesting or here.switched:
        return now >= here.nesting
    return here.device is None or _is_enabled(here.device)


def _enter(wanted: Started) -> None:
    here = HERE
    here.is_inner, here.is_late = nesting() > 0, False
    for region in wanted.regions():
        region.__enter__()
        here.regions.append(region)
    here.started, here.nesting = wanted, nesting()
    here.device = next((one for one in wanted.device_types if _is_enabled(one)), None)


def _leave() -> None:
    here = HERE
    regions, here.regions = here.regions, []
    here.started = None
    here.forwards.clear()
    for switched in here.switched:
        switched.flags, switched.watched = (), None  # of regions that are left
    if here.is_inner and nesting() < here.nesting:
        _abandon(regions)
        return
    while regions:
        regions.pop().__exit__(None, None, None)


def _leave_after_fork() -> None:
    """Leave the regions in a process that was forked: a worker of a DataLoader has no model to call."""
    if HERE.started is None:
        return
    # So that the outermost region does not end, and empty PyTorch's cache: another thread may have held its lock.
    _increment()
    try:
        _leave()
    finally:
        _decrement()


def _abandon(regions: list[autocast]) -> None:
    """Leave regions around which another one has ended already, and has put back what it had found.

    What that one has put back stays; what it did not know of is put back now.
    """
    while regions:
        region = regions.pop()
        device = region.device
        (cache_enabled, enabled, dtype, before), *_ = region._entries.pop(threading.get_ident())
        if _is_enabled(device) and torch.get_autocast_dtype(device) is region.fast_dtype:
            _set_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        if not torch.is_autocast_cache_enabled():
            torch.set_autocast_cache_enabled(cache_enabled)
        if region._slot.active is not None and region._slot.active.policy is region.policy:
            region._slot.leave(before)
        if _decrement() == 0:
            torch.clear_autocast_cache()
    _set_token()


def _set_token() -> None:
    """Have the states that stand for policies say what this thread's scope says."""
    token = dict(THREAD.scope.token)
    for device in DEVICES:
        torch.set_autocast_dtype(device, token.get(device, _USUAL[device]))
        if device in token and device == SWITCH:
            include()
        _set_enabled(device, device in token)
