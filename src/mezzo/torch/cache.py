"""The casts of weights that mezzo's own kernels have made.

PyTorch keeps such a cache for its own kernels. It ignores changes of the weight and the dtype of the cast, and is shared by
all threads. This one belongs to a thread and returns a cast only if the weight is what it was: same version counter, same
storage, same dtype.

Its casts live as long as PyTorch's would: until the thread leaves its outermost region, be it mezzo's or
``torch.autocast``, or calls ``torch.clear_autocast_cache``. That function is what both kinds of region call then, and
PyTorch offers no other way to hear of it; so it is wrapped, once, when mezzo registers its first kernel. Nothing else of
PyTorch is touched.

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

from mezzo.torch.eager import runs_eagerly

__all__ = ["caster_of_weights", "casts_of_thread", "is_cached", "keep_in_step"]

Cast = Callable[[Tensor, torch.dtype], Tensor]

_Entry = tuple[Tensor, int, int, Tensor, int]
"""The weight, its version and its address when it was cast, the cast and its version. Its graph holds the weight anyway."""


class _Casts(dict[int, _Entry]):
    """Casts to one dtype by the weight's identity; a class of its own so that it can be held weakly."""

    __slots__ = ("__weakref__",)


class _Thread(threading.local):
    """A thread's casts by dtype."""

    def __init__(self) -> None:
        self.casts = {torch.bfloat16: _Casts(), torch.float16: _Casts()}
        self.all_casts = tuple(self.casts.values())
        with _lock:
            self._join()

    def _join(self) -> None:
        # Those of threads that are gone are left out on the way.
        alive = [reference for reference in list(_of_all_threads) if reference() is not None]
        _of_all_threads[:] = [*alive, *map(weakref.ref, self.casts.values())]


_lock = threading.Lock()
_of_all_threads: list[weakref.ref[_Casts]] = []
_thread = _Thread()
_in_step = False

_enabled = torch.is_autocast_cache_enabled
# Calls are being written down: a cast from outside would end up as a constant there.
_tracing = torch._C._get_tracing_state
_modes = torch._C._len_torch_dispatch_stack


def casts_of_thread() -> list[Tensor]:
    """Give the casts that the calling thread keeps."""
    return [entry[3] for casts in _thread.casts.values() for entry in casts.values()]


def caster_of_weights(cast: Cast) -> Cast:
    """Make a cast that is made once for a weight, as long as it stays what it is.

    Kept are casts of float32 leaves that require gradients. A new cast is made, and none kept, where one could outlive its
    truth: with the cache switched off, in inference mode, for views, and for tensors that stand for others while code is
    traced or transformed.

    Args:
        cast: Casts a tensor if it is eligible, else returns it as it came.

    Returns:
        The same with a memory. A kept cast is connected to its weight in the autograd graph, whatever the grad mode was
        when it was made.
    """

    def cast_weight(tensor: Tensor, target: torch.dtype) -> Tensor:
        # The order is for speed: a hit is what matters, and an entry is only there for what may be kept.
        casts = _thread.casts.get(target)
        if casts is None:
            return cast(tensor, target)
        entry = casts.get(id(tensor))
        if entry is None:
            return keep(tensor, target, casts) if tensor.requires_grad else cast(tensor, target)
        _, version, pointer, kept, kept_version = entry
        if (
            version == tensor._version
            and kept_version == kept._version
            and pointer == tensor.data_ptr()
            and tensor.requires_grad
            and _enabled()
            and not _modes()
            and _tracing() is None
        ):
            return kept
        return keep(tensor, target, casts)

    def keep(tensor: Tensor, target: torch.dtype, casts: _Casts) -> Tensor:
        if not tensor.is_leaf or not _enabled() or not _keepable(tensor):
            return cast(tensor, target)
        with torch.enable_grad():
            made = cast(tensor, target)
        if made is not tensor:
            casts[id(tensor)] = (tensor, tensor._version, tensor.data_ptr(), made, made._version)
        return made

    return cast_weight


def _keepable(weight: Tensor) -> bool:
    # A fake, functional or batched tensor stands for another one; only a plain tensor or Parameter is what it seems.
    kind = type(weight)
    return (
        (kind is torch.nn.Parameter or kind is Tensor)
        and weight.dtype is torch.float32
        and weight.layout is torch.strided
        and not torch.is_inference_mode_enabled()
        and not weight.is_inference()
        and not weight._is_view()
        and not _modes()
        and _tracing() is None
        and not torch._C._functorch.is_functorch_wrapped_tensor(weight)
        and not torch._is_functional_tensor(weight)
        and not torch.compiler.is_compiling()
    )


def is_cached(weight: Tensor, target: torch.dtype) -> bool:
    """Say whether the next cast of a weight in this thread would be one that was made before."""
    entry = _thread.casts.get(target, _Casts()).get(id(weight))
    if entry is None or not _enabled():
        return False
    return entry[1] == weight._version and entry[2] == weight.data_ptr()


def keep_in_step() -> None:
    """Have the casts die with PyTorch's, and at every optimizer step; set up once per process."""
    global _in_step  # noqa: PLW0603 - once per process
    if _in_step:
        return
    _in_step = True
    register_optimizer_step_post_hook(_after_step)
    original = torch.clear_autocast_cache

    @functools.wraps(original)
    @runs_eagerly
    def clear_autocast_cache() -> None:
        for casts in _thread.all_casts:
            if casts:
                casts.clear()
        original()

    torch.clear_autocast_cache = clear_autocast_cache


def _after_step(*_: object) -> None:
    for reference in _of_all_threads:
        casts = reference()
        if casts is not None:
            casts.clear()
