"""The casts of weights that mezzo's own kernels have made.

PyTorch keeps such a cache for its own kernels. It ignores changes of the weight and the dtype of the cast, and is shared by
all threads. This one belongs to a thread and returns a cast only if the weight is what it was: same version counter, same
storage, same dtype.

Its casts live as long as PyTorch's would: until the thread leaves its outermost region, be it mezzo's or
``torch.autocast``, or calls ``torch.clear_autocast_cache``. That function is what both kinds of region call then, and PyTorch
offers no other way to hear of it; so it is wrapped, once, when mezzo registers its first kernel. Nothing else of PyTorch is
touched.

Two kinds of write leave no trace on the weight: ``p.data.add_()`` and the fused steps of some optimizers. So that the
second is seen inside a region too, every optimizer step empties the cache, through PyTorch's global post-step hook.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["cached_cast", "casts_of_thread", "is_cached", "keep_in_step"]

_Entry = tuple[weakref.ref[Tensor], int, int, Tensor]
"""The weight, its version and its address when it was cast, and the cast."""

Casts = dict[tuple[int, torch.dtype], _Entry]
"""The casts by the weight's identity and the dtype cast to."""


class _Thread(threading.local):
    """A thread's casts, and the optimizer steps there had been when they were made."""

    def __init__(self) -> None:
        self.casts: Casts = {}
        self.steps = 0


_thread = _Thread()
_steps = 0  # optimizer steps in any thread
_in_step = False

# Calls are being written down: a cast from outside would end up as a constant there.
tracing = torch._C._get_tracing_state
modes = torch._C._len_torch_dispatch_stack


def casts_of_thread() -> Casts:
    """Give the calling thread's casts, those of before the last optimizer step left out."""
    if _thread.steps != _steps:
        _thread.casts.clear()
        _thread.steps = _steps
    return _thread.casts


def cached_cast(weight: Tensor, target: torch.dtype, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Cast a leaf that requires gradients, or return the cast made of it before.

    A new cast is made, and none kept, where one could outlive its truth: with the cache switched off, in inference mode, for
    views, and for tensors that stand for others while code is traced or transformed.

    Args:
        weight: A float32 leaf tensor that requires gradients.
        target: The dtype to cast to.
        convert: Makes the cast.

    Returns:
        The cast, connected to ``weight`` in the autograd graph whatever the grad mode was when it was made.
    """
    if not torch.is_autocast_cache_enabled() or tracing() is not None or modes():
        return convert(weight)
    casts = casts_of_thread()
    key = (id(weight), target)
    entry = casts.get(key)
    if entry is not None and _is_of(entry, weight):
        return entry[3]
    if not _keepable(weight):
        return convert(weight)
    with torch.enable_grad():
        cast = convert(weight)
    # The callback bounds the memory: a weight that dies in the region takes its cast along.
    source = weakref.ref(weight, lambda _: casts.pop(key, None))
    casts[key] = (source, weight._version, weight.data_ptr(), cast)
    return cast


def _is_of(entry: _Entry, weight: Tensor) -> bool:
    source, version, pointer, _ = entry
    return source() is weight and version == weight._version and pointer == weight.data_ptr()


def is_cached(weight: Tensor, target: torch.dtype) -> bool:
    """Say whether the next cast of a weight in this thread would be one that was made before."""
    entry = casts_of_thread().get((id(weight), target))
    return entry is not None and torch.is_autocast_cache_enabled() and _is_of(entry, weight)


def _keepable(weight: Tensor) -> bool:
    # A fake, functional or batched tensor stands for another one; only a plain tensor or Parameter is what it seems.
    kind = type(weight)
    return (
        (kind is torch.nn.Parameter or kind is Tensor)
        and weight.layout is torch.strided
        and not torch.is_inference_mode_enabled()
        and not weight.is_inference()
        and not weight._is_view()
        and not torch._C._functorch.is_functorch_wrapped_tensor(weight)
        and not torch._is_functional_tensor(weight)
        and not torch.compiler.is_compiling()
    )


def keep_in_step() -> None:
    """Have the casts die with PyTorch's, and at every optimizer step; set up once per process."""
    global _in_step  # noqa: PLW0603 - once per process
    if _in_step:
        return
    _in_step = True
    register_optimizer_step_post_hook(_after_step)
    original = torch.clear_autocast_cache

    @functools.wraps(original)
    def clear_autocast_cache() -> None:
        _thread.casts.clear()
        original()

    torch.clear_autocast_cache = clear_autocast_cache


def _after_step(*_: object) -> None:
    global _steps  # noqa: PLW0603 - one counter tells all threads
    _steps += 1
