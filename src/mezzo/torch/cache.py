"""The casts of weights that mezzo's kernels have made.

PyTorch keeps such a cache for its own kernels. It ignores changes of the weight and the dtype of the cast, never holds a
frozen weight, and is shared by all threads. This one belongs to a thread and returns a cast only if the weight is what it
was: same version counter, same storage, same dtype.

Its casts live as long as PyTorch's would: until the thread leaves its outermost region, be it mezzo's or
``torch.autocast``, or calls ``torch.clear_autocast_cache``. That function is what both kinds of region call then, and
PyTorch offers no other way to hear of it; so it is wrapped, once, when mezzo registers its first kernel, or on
an accelerator that is plugged in keeps its first cast. Nothing else of PyTorch is touched. With
`mezzo.torch.keep_casts` they live longer.

Two kinds of write leave no trace on the weight: ``p.data.add_()`` and the fused steps of some optimizers. So that the
second is seen inside a region too, every optimizer step empties the cache, through PyTorch's global post-step hook.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo.torch.eager import runs_eagerly
from mezzo.torch.watch_mode import other_modes

__all__ = [
    "Entry",
    "at_region_end",
    "cast_weight_with",
    "casts_of_thread",
    "epoch",
    "forget_native_casts",
    "is_cached",
    "is_plain",
    "keep_in_step",
    "keeping",
    "kept_casts",
    "times_kept",
]

Cast = Callable[[Tensor, torch.dtype], Tensor]

State = tuple[int, int, torch.Size, tuple[int, ...], bool, torch.UntypedStorage]
"""Of a weight: its version, address, shape and strides, whether it requires gradients, and its storage.

The storage is held so that its address is not given to another one.
"""

Entry = tuple[Tensor, State, Tensor, int]
"""The weight, its state when it was cast, the cast and its version.

The weight is held so that its identity is not given to another tensor.
"""


class _Casts(dict[int, Entry]):
    """Casts to one dtype by the weight's identity.

    Attributes:
        sweep_at: The number of entries at which those of weights that nobody else holds are dropped; twice as many as
            were alive the last time. So the memory is bounded by that of the weights in use.
    """

    __slots__ = ("__weakref__", "sweep_at")

    def __init__(self) -> None:
        super().__init__()
        self.sweep_at = _SMALL

    def clear(self) -> None:
        super().clear()
        self.sweep_at = _SMALL

    def add(self, entry: Entry) -> None:
        self[id(entry[0])] = entry
        if len(self) >= self.sweep_at:
            for key in [key for key, kept in list(self.items()) if _is_forgotten(kept)]:
                self.pop(key, None)  # another thread's optimizer step may have emptied this
            self.sweep_at = max(_SMALL, 2 * len(self))


_SMALL = 64


def _is_forgotten(entry: Entry) -> bool:
    # Held by the entry, by the call, and by the weight's own C++ part if that is held by others, such as the cast's graph.
    weight = entry[0]
    shared = int(weight._use_count() > 1)  # type: ignore[attr-defined]
    return sys.getrefcount(weight) <= 3 + shared


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


class _Epoch:
    """Counts how often PyTorch's own cache, one for all threads, has been emptied.

    Attributes:
        now: The count.
        held: The weights that it may hold casts of, and their storages, so that neither identity nor address is given to
            others.
        after_use: What is called when it has been emptied and something was held.
    """

    def __init__(self) -> None:
        self.now = 0
        self.held: list[object] = []
        self.after_use: list[Callable[[], None]] = []

    def end(self) -> None:
        """Begin to count anew."""
        self.now += 1
        if self.held:
            self.held.clear()
            for call in self.after_use:
                call()


class _Keeping(threading.local):
    """Says whether casts live across regions in a thread.

    Attributes:
        depth: How many `mezzo.torch.keep_casts` are open.
    """

    depth = 0


at_region_end: list[Callable[[], None]] = []
"""What is called when a thread leaves its outermost region, and whenever ``torch.clear_autocast_cache`` is."""

epoch = _Epoch()
keeping = _Keeping()
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
    return [entry[2] for casts in _thread.casts.values() for entry in casts.values()]


def times_kept(weight: Tensor) -> int:
    """Count the casts that the calling thread keeps of a weight, each of which holds it."""
    entries = (casts.get(id(weight)) for casts in _thread.all_casts)
    return sum(entry is not None and entry[0] is weight for entry in entries)


def kept_casts(target: torch.dtype) -> dict[int, Entry] | None:
    """Give the calling thread's casts to a dtype, if kept casts may be used now.

    They may not with the cache switched off, nor while calls are traced or looked at from below: there a cast from outside
    would be a constant, or a call that is missing when checkpointing runs the same code again.

    Args:
        target: The dtype.

    Returns:
        The entries by the identity of the weight; None if each cast has to be made anew.
    """
    if _enabled() and not (_modes() and other_modes()) and _tracing() is None:
        return _thread.casts.get(target)
    return None


def cast_weight_with(cast: Cast) -> Cast:
    """Make a cast that is made once for a weight, as long as it stays what it is.

    Kept are casts of float32 leaves that require gradients, as PyTorch does, and of frozen `torch.nn.Parameter`. A new cast
    is made, and none kept, where one could outlive its truth: with the cache switched off, for views, for tensors made in
    inference mode, and for tensors that stand for others while code is traced or transformed.

    Args:
        cast: Casts a tensor if it is eligible, else returns it as it came.

    Returns:
        The same with a memory. A kept cast is connected to its weight in the autograd graph, whatever the grad mode was
        when it was made.
    """

    def cast_weight(tensor: Tensor, target: torch.dtype) -> Tensor:
        casts = kept_casts(target)
        if casts is None:
            return cast(tensor, target)
        entry = casts.get(id(tensor))
        if entry is not None and is_fresh(entry, tensor):
            return entry[2]
        if not _keepable(tensor):
            return cast(tensor, target)
        # Before the cast, during which another thread may write.
        state = _state_of(tensor)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            made = cast(tensor, target)
        else:
            # Neither a cast without a graph nor an inference tensor may be handed to a training forward later.
            with torch.inference_mode(False), torch.enable_grad():
                made = cast(tensor, target)
        if made is not tensor:
            _keep(tensor, state, target, made)
        return made

    return cast_weight


def is_fresh(entry: Entry, weight: Tensor) -> bool:
    """Say whether a kept cast still is what a cast made now would be."""
    version, address, shape, strides, requires_grad, storage = entry[1]
    return (
        version == weight._version
        and address == weight.data_ptr()
        and shape == weight.shape
        and strides == weight.stride()
        and requires_grad is weight.requires_grad
        and entry[3] == entry[2]._version
        # The tensors of a backend written in Python have no address.
        and (address != 0 or storage._cdata == weight.untyped_storage()._cdata)
    )


def _state_of(weight: Tensor) -> State:
    place = weight.data_ptr(), weight.shape, weight.stride()
    return (weight._version, *place, weight.requires_grad, weight.untyped_storage())


def _keep(weight: Tensor, state: State, target: torch.dtype, made: Tensor) -> None:
    keep_in_step()
    _thread.casts[target].add((weight, state, made, made._version))


@lru_cache(maxsize=256)
def is_plain(kind: type) -> bool:
    """Say whether the tensors of a class are what they seem, and do not stand for others."""
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__  # type: ignore[attr-defined]


@lru_cache(maxsize=8)
def _class_on(device_type: str) -> type:
    """Give the class of the tensors that a device makes."""
    try:
        with torch._C.DisableTorchFunction():
            return type(torch.empty(0, device=device_type))
    except (RuntimeError, TypeError):
        return Tensor


def _is_of_its_device(weight: Tensor) -> bool:
    """Say whether a tensor of a subclass is what its device makes: so it is on a backend written in Python."""
    device_type = weight.device.type
    if device_type != torch._C._get_privateuse1_backend_name():
        return False
    return type(weight) is _class_on(device_type)


def _keepable(weight: Tensor) -> bool:
    # A fake, functional or batched tensor stands for another one.
    return (
        (is_plain(type(weight)) or _is_of_its_device(weight))
        and (weight.requires_grad or isinstance(weight, torch.nn.Parameter))
        and weight.is_leaf
        and weight.dtype is torch.float32
        and weight.layout is torch.strided
        and not weight.is_inference()
        and not weight._is_view()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._is_functional_tensor(weight)
        and not torch.compiler.is_compiling()
    )


def is_cached(weight: Tensor, target: torch.dtype) -> bool:
    """Say whether the next cast of a weight in this thread would be one that was made before."""
    entry = (kept_casts(target) or {}).get(id(weight))
    return entry is not None and is_fresh(entry, weight)


def keep_in_step() -> None:
    """Have the casts die with PyTorch's, and at every optimizer step; set up once per process."""
    global _in_step  # noqa: PLW0603 - once per process
    if _in_step:
        return
    _in_step = True
    register_optimizer_step_post_hook(_after_step)
    original = torch.clear_autocast_cache
    _clear_native.append(original)

    @functools.wraps(original)
    @runs_eagerly
    def clear_autocast_cache() -> None:
        for call in at_region_end:
            call()
        for casts in _thread.all_casts:
            if casts:
                casts.clear()
        epoch.end()
        original()

    torch.clear_autocast_cache = clear_autocast_cache


_clear_native: list[Callable[[], None]] = []


def forget_native_casts() -> None:
    """Empty PyTorch's own cache."""
    epoch.end()
    for clear in _clear_native:
        clear()


def _after_step(*_: object) -> None:
    forget_native_casts()
    for reference in _of_all_threads:
        casts = reference()
        if casts is not None:
            casts.clear()
