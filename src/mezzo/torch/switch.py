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

__all__ = ["DEVICE", "KEY", "KEY_NAME", "include", "let_higher_order_ops_through", "let_through"]

DEVICE = "ipu"
KEY_NAME = "AutocastIPU"
KEY = torch._C._dispatch_key_parse(KEY_NAME)

_libraries: dict[str, torch.library.Library] = {}
_lock = threading.Lock()


def include(*_: object) -> None:
    """Include the key in this thread's state; it stays off until autocast is enabled for `DEVICE`.

    It is not taken out again: other code may have copied the thread's state, and the key is off by itself.
    """
    # Asked each time: autograd gives its threads a state for the length of a backward pass, and takes it away again.
    if torch._C._dispatch_tls_is_dispatch_key_included(KEY):
        return
    with _lock:
        if KEY_NAME not in _libraries:
            let_through(KEY_NAME)
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, True)


def let_through(key_name: str) -> None:
    """Have every op that has no kernel on an autocast key go on to the next key.

    Args:
        key_name: The key; it must have no fallback yet.
    """
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, key_name)
    _libraries[key_name] = library
    let_higher_order_ops_through(torch._C._dispatch_key_parse(key_name))


def let_higher_order_ops_through(key: torch._C.DispatchKey) -> None:
    """Do the same for higher-order ops: they know no fallback but a list of keys to pass over.

    Each device's autocast key has to be in it. Done again, it changes nothing.
    """
    passed_over = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    if key not in passed_over:
        passed_over.append(key)
        for op in torch._ops._higher_order_ops.values():
            op.fallthrough(key)
