"""The dispatch key on which mezzo looks over the shoulder of PyTorch's own autocast kernels.

It is the autocast key of a device type that no build of PyTorch can run, so nothing else is registered there, and it
comes before the keys of real devices. A thread that has it on reaches mezzo's kernels first (`mezzo.torch.watching`), and
PyTorch's behind them; in all other threads, and in plain ``torch.autocast`` regions, calls reach PyTorch's directly and at
its speed.

The key is on where it is included in the thread's state and autocast is enabled for its device type. The latter is part of
what marks a policy for compiled code (`mezzo.torch.tokens`), so that the key is on while such code is traced, too.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["DEVICE", "KEY", "KEY_NAME", "include"]

DEVICE = "ipu"
KEY_NAME = "AutocastIPU"
KEY = torch._C._dispatch_key_parse(KEY_NAME)

_libraries: list[torch.library.Library] = []
_lock = threading.Lock()


def include(*_: object) -> None:
    """Include the key in this thread's state; it stays off until autocast is enabled for `DEVICE`.

    It is not taken out again: other code may have copied the thread's state, and the key is off by itself.
    """
    # Asked each time: autograd gives its threads a state for the length of a backward pass, and takes it away again.
    if torch._C._dispatch_tls_is_dispatch_key_included(KEY):
        return
    with _lock:
        if not _libraries:
            _let_through()
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, True)


def _let_through() -> None:
    """Have every op for which mezzo has no kernel go on to the next key."""
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, KEY_NAME)
    _libraries.append(library)
    # Higher-order ops know no fallback but a list of keys to pass over, in which each device's autocast key has to be.
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(KEY)
    for op in torch._ops._higher_order_ops.values():
        op.fallthrough(KEY)
