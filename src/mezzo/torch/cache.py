"""The casts of weights that mezzo's own kernels have made in the current outermost region.

PyTorch keeps such a cache too, for its own kernels. It ignores changes of the weight and the dtype of the cast, is shared
by all threads, and any thread's exit empties it. This one belongs to a thread, lives as long as the thread's outermost
mezzo region, and returns a cast only if the weight is what it was: same version counter, same storage, same dtype.

Two kinds of write leave no trace on the weight: ``p.data.add_()`` and the fused steps of some optimizers. So that the
second is seen too, every optimizer step empties the cache, through PyTorch's global post-step hook.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["Casts", "cached_cast", "casts_of_thread", "is_cached", "hook_optimizers"]

_Entry = tuple[weakref.ref[Tensor], int, int, Tensor]
"""The weight, its version and its address when it was cast, and the cast."""


class Casts:
    """A thread's casts, and how many mezzo regions it has open.

    Outside any region nothing says when a cast would have to die, so none is kept there.
    """

    __slots__ = ("depth", "entries", "epoch")

    def __init__(self) -> None:
        self.depth = 0
        self.epoch = 0
        self.entries: dict[tuple[int, torch.dtype], _Entry] = {}


class _Thread(threading.local):
    def __init__(self) -> None:
        self.casts = Casts()


_thread = _Thread()
_epoch = 0  # moves on at every optimizer step, in any thread
_hooked = False

# Calls are being written down: a cast from outside would end up as a constant there.
tracing = torch._C._get_tracing_state
modes = torch._C._len_torch_dispatch_stack


def casts_of_thread() -> Casts:
    """Give the calling thread's casts."""
    return _thread.casts


def cached_cast(weight: Tensor, target: torch.dtype, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Cast a leaf that requires gradients, or return the cast made of it before.

    A new cast is made, and none kept, where one could outlive its truth: outside a mezzo region, with the cache switched
    off, in inference mode, for views, and for tensors that stand for others while code is traced or transformed.

    Args:
        weight: A float32 leaf tensor that requires gradients.
        target: The dtype to cast to.
        convert: Makes the cast.

    Returns:
        The cast, connected to ``weight`` in the autograd graph whatever the grad mode was when it was made.
    """
    casts = _thread.casts
    if casts.depth == 0 or not torch.is_autocast_cache_enabled() or tracing() is not None or modes():
        return convert(weight)
    entries = casts.entries
    if casts.epoch != _epoch:
        entries.clear()
        casts.epoch = _epoch
    key = (id(weight), target)
    entry = entries.get(key)
    if entry is not None:
        source, version, pointer, cast = entry
        if source() is weight and version == weight._version and pointer == weight.data_ptr():
            return cast
    if not _keepable(weight):
        return convert(weight)
    with torch.enable_grad():
        cast = convert(weight)
    entries[key] = (weakref.ref(weight), weight._version, weight.data_ptr(), cast)
    return cast


def is_cached(weight: Tensor, target: torch.dtype) -> bool:
    """Say whether the next cast of a weight in this thread would be one that was made before."""
    casts = _thread.casts
    entry = casts.entries.get((id(weight), target))
    if entry is None or casts.depth == 0 or casts.epoch != _epoch or not torch.is_autocast_cache_enabled():
        return False
    source, version, pointer, _ = entry
    return source() is weight and version == weight._version and pointer == weight.data_ptr()


def _keepable(weight: Tensor) -> bool:
    # A fake, functional or batched tensor stands for another one; only a plain tensor or Parameter is what it seems.
    kind = type(weight)
    return (
        (kind is torch.nn.Parameter or kind is Tensor)
        and not torch.is_inference_mode_enabled()
        and not weight._is_view()
        and not torch._C._functorch.is_functorch_wrapped_tensor(weight)
        and not torch._is_functional_tensor(weight)
        and not torch.compiler.is_compiling()
    )


def hook_optimizers() -> None:
    """Have every optimizer step forget the casts of all threads; registered once per process, not at import."""
    global _hooked  # noqa: PLW0603 - once per process
    if not _hooked:
        _hooked = True
        register_optimizer_step_post_hook(_after_step)


def _after_step(*_: object) -> None:
    global _epoch  # noqa: PLW0603 - one counter tells all threads
    _epoch += 1
