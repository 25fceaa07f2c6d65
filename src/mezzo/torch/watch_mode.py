"""The dispatch mode that mezzo's tools watch a thread with, and how the rest of mezzo knows it from others.

PyTorch's dispatch modes may do anything with an op: trace it, fake it, hand on other tensors. So mezzo keeps no cast while
one is open. A `WatchMode` only looks on: what it hands on is what the op gave. mezzo's kernels do as if it was not there.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

__all__ = ["FRONT_KEY", "FRONT_KEY_NAME", "WatchMode", "close", "is_watched", "open_mode", "other_modes", "unwatched"]

FRONT_KEY_NAME = "TESTING_ONLY_GenericMode"
"""Behind the key for tracers and in front of all that computes; PyTorch includes it in no thread. See
`mezzo.torch.recording.listed_ops`."""

FRONT_KEY = torch._C._dispatch_key_parse(FRONT_KEY_NAME)

_count = torch._C._len_torch_dispatch_stack
_at = torch._C._get_dispatch_stack_at


class WatchMode(TorchDispatchMode):
    """A mode that changes nothing. Its ``__torch_dispatch__`` is to be decorated by `mezzo.torch.eager.runs_eagerly`."""

    # Without it PyTorch refuses to run higher-order ops, such as flex_attention's, while the mode is open.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that PyTorch need not keep Dynamo out: it would import it, and all of the process be slower from then on."""
        return False


def other_modes() -> bool:
    """Say whether a mode is open in this thread that is not one of these."""
    return any(not isinstance(_at(place), WatchMode) for place in range(_count()))


def open_mode(mode: WatchMode) -> None:
    """Put a mode on this thread's stack."""
    mode.__enter__()  # type: ignore[no-untyped-call]


def close(mode: WatchMode) -> None:
    """Take a mode off this thread's stack, wherever it is there; blocks may end in another order than they began.

    Args:
        mode: The mode; nothing happens if it is not there.
    """
    stack = [_at(place) for place in range(_count())]
    if not any(one is mode for one in stack):
        return
    if stack[-1] is mode:
        mode.__exit__(None, None, None)
        return
    above = stack[next(place for place, one in enumerate(stack) if one is mode) + 1 :]
    # The flags by which PyTorch knows that a mode is open are restored by the next one now.
    for name, flags in vars(mode).items():
        theirs = vars(above[0]).get(name)
        if name.startswith("old_") and isinstance(flags, deque) and isinstance(theirs, deque) and flags and theirs:
            theirs[-1] = flags.pop()
    for _ in above:
        _pop_mode()
    _pop_mode()
    for one in above:
        _push_mode(one)


def is_watched() -> bool:
    """Say whether one of these is open in this thread; autograd carries them into the threads of a backward pass."""
    return any(isinstance(_at(place), WatchMode) for place in range(_count()))


def _keys() -> torch._C.DispatchKeySet:
    names = (
        "Autocast" + device for device in ("CPU", "CUDA", "XPU", "MPS", "MTIA", "IPU", "HPU", "XLA", "PrivateUse1")
    )
    keys = torch._C.DispatchKeySet(FRONT_KEY)
    for name in ("AutogradFunctionality", "Python", "PythonTLSSnapshot", *names):
        keys = keys | torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name))
    return keys


_ABOVE = _keys()


def unwatched() -> Any:
    """Give a context in which a tool computes for itself: no autocast, no autograd and no mode sees its ops.

    PyTorch takes a mode off while it is called, but not those that were opened before it.
    """
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE)
