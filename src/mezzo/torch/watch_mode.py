"""The dispatch mode that mezzo's tools watch a thread with, and how the rest of mezzo knows it from others.

PyTorch's dispatch modes may do anything with an op: trace it, fake it, hand on other tensors. So mezzo keeps no cast while
one is open. A `WatchMode` only looks on: what it hands on is what the op gave. mezzo's kernels do as if it was not there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FRONT_KEY", "FRONT_KEY_NAME", "WatchMode", "is_watched", "other_modes", "top_mode", "unwatched"]

FRONT_KEY_NAME = "TESTING_ONLY_GenericMode"
"""Behind the key for tracers and in front of all that computes; PyTorch includes it in no thread. See
`mezzo.torch.listed_ops`."""

FRONT_KEY = torch._C._dispatch_key_parse(FRONT_KEY_NAME)

_count = torch._C._len_torch_dispatch_stack
_at = torch._C._get_dispatch_stack_at


class WatchMode(TorchDispatchMode):
    """A mode that changes nothing."""

    # Without it PyTorch refuses to run higher-order ops, such as flex_attention's, while the mode is open.
    supports_higher_order_operators = True


def other_modes() -> bool:
    """Say whether a mode is open in this thread that is not one of these."""
    return any(not isinstance(_at(place), WatchMode) for place in range(_count()))


def top_mode() -> object:
    """Give the mode of this thread that was opened last; None if none is open."""
    return _at(_count() - 1) if _count() else None


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
