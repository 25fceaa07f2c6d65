"""Fresh casts for PyTorch's own kernels.

PyTorch's cache goes by the weight alone. So it is written down here at which version, address and dtype each weight was
last cast. If it has changed since, PyTorch's cache is emptied. Where PyTorch keeps no cast, or one to another dtype, the
call gets one of mezzo's own (`mezzo.torch.cache`): in inference mode, of frozen weights, in a region of another dtype in
another.

This runs at every linear layer, so arguments are looked at as little as can be.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.torch.active import slot_for
from mezzo.torch.cache import epoch, forget_native_casts, is_plain, keeping, times_kept
from mezzo.torch.casting import device_for
from mezzo.torch.ops import OpSpec

__all__ = ["fresh_arguments", "own_cast", "tensors_in"]

_Note = list[Any]
"""Of a weight: its version, address, shape and strides, the dtype of the cast, and the epoch in which it was last used."""

_notes: dict[int, _Note] = {}
"""By the identity of the weight, which nothing else has while PyTorch's cache may hold a cast of it: it is held then."""

# PyTorch's cache is one for all threads, and plain regions in others fill it without a note.
_threads = threading._active  # type: ignore[attr-defined]
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_region_dtype = torch.get_autocast_dtype
_cache_enabled = torch.is_autocast_cache_enabled
_modes = torch._C._len_torch_dispatch_stack
_is_inference = torch.is_inference_mode_enabled
_tracing = torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack


def fresh_arguments(  # noqa: C901 - see `fresh` in it
    spec: OpSpec, lower_on: frozenset[str]
) -> Callable[[Sequence[Any]], Sequence[Any] | None]:
    """Make the look at an op's arguments after which PyTorch's kernel uses no stale cast of a weight.

    Args:
        spec: The op.
        lower_on: The device types on which that casts the op's inputs to a lower precision, and keeps casts of weights.

    Returns:
        A function of the positional arguments that gives what to call the kernel with, casts of mezzo's own in the place of
        weights of which PyTorch keeps none; None if the kernel must not use kept casts at all.
    """
    last = 3 if spec.leading_tensors == 2 else len(spec.positional_defaults)

    def fresh(args: Sequence[Any]) -> Sequence[Any] | None:  # noqa: C901 - each call less is felt at every linear layer
        if not _cache_enabled():
            return args
        if (_modes() or _tracing() is not None or _transforms() is not None) and _writes_down():
            return None
        device = "cpu" if getattr(args[0], "is_cpu", False) else _device_type(args)
        if device not in lower_on:
            return args
        low = _region_dtype(device)
        if _is_inference() or keeping.depth or len(_threads) > 1:
            return _with_own_casts(args, spec.name, device, low)
        now, held = epoch.now, epoch.held
        for place, value in enumerate(args[:last]):
            note = _notes.get(id(value))
            if note is not None and note[1] is low and value.requires_grad and value.is_leaf:
                try:
                    state = value._version, value.data_ptr(), value.shape, value.stride()
                except RuntimeError:  # another tensor, without such a state, that got the identity of one that is gone
                    return None
                if note[2] != now:
                    # PyTorch's cache was emptied since, so that this needs no more than to be written down.
                    note[0], note[2] = state, now
                    held += value, value.untyped_storage()
                    continue
                if note[0] == state:
                    continue
            elif value.__class__ is Tensor and not value.is_leaf:  # an activation
                continue
            mine = _looked_at(value, spec.name, low)
            if mine is None:
                return None
            if mine is not value:
                args = (*args[:place], mine, *args[place + 1 :])
        return args

    return fresh


def _with_own_casts(args: Sequence[Any], op: str, device: str, low: torch.dtype) -> Sequence[Any]:
    """Put casts of mezzo's own in the place of weights: in inference mode, and of frozen ones, PyTorch keeps none."""
    return _own_casts_of(args, low) if _is_served_natively(op, device, low) else args


def _own_casts_of(values: Sequence[Any], low: torch.dtype) -> list[Any]:
    new = list(values)
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            if value.dtype is torch.float32 and (value.requires_grad or issubclass(type(value), torch.nn.Parameter)):
                new[place] = device_for(value.device.type).cast_weight(value, low)
        elif isinstance(value, list | tuple):
            new[place] = _own_casts_of(value, low)
    return new


def _looked_at(value: Any, op: str, low: torch.dtype) -> Any:
    """Make sure that PyTorch keeps no stale cast of a value, and write down its state.

    Returns:
        What to call the op with: the value, or a cast of it; None if PyTorch must not use its kept casts for this call.
    """
    if isinstance(value, list | tuple):
        return _all_looked_at(value, op, low)
    if not isinstance(value, Tensor) or not value.is_leaf or value.dtype is not torch.float32:
        return value
    if not value.requires_grad:
        return own_cast(value, op, low) if issubclass(type(value), torch.nn.Parameter) else value
    if value.layout is not torch.strided or value.is_inference() or not is_plain(type(value)):
        return None
    note = _notes.get(id(value))
    if note is not None and note[2] == epoch.now:
        if note[1] is not low:
            return own_cast(value, op, low)
        forget_native_casts()
    _write_note(value, low)
    return value


def _all_looked_at(values: Sequence[Any], op: str, low: torch.dtype) -> list[Any] | None:
    looked = [_looked_at(value, op, low) for value in values]
    return None if any(one is None for one in looked) else looked


def own_cast(value: Tensor, op: str, low: torch.dtype) -> Tensor:
    """Give a kept cast of mezzo's own, if PyTorch's kernel would cast."""
    device = value.device.type
    return device_for(device).cast_weight(value, low) if _is_served_natively(op, device, low) else value


def _is_served_natively(op: str, device: str, low: torch.dtype) -> bool:
    """Say whether it is PyTorch's own kernel that a call will come to, and that will cast."""
    # Off for this device, or inside of an op that is not to be cast again: PyTorch's kernel does not cast either.
    if _is_excluded(device_for(device).key):
        return False
    plan = slot_for(device).current().plan
    if plan is None or op not in plan.watched:
        return False
    return op not in (plan.float16 if low is torch.float16 else plan.bfloat16)


def _write_note(value: Tensor, low: torch.dtype) -> None:
    _notes[id(value)] = [(value._version, value.data_ptr(), value.shape, value.stride()), low, epoch.now]
    # Neither its identity nor its address is to be given to another tensor while PyTorch's cache may hold a cast of it.
    epoch.held += (value, value.untyped_storage())
    if len(epoch.held) >= _Limit.held:
        _sweep()


class _Limit:
    """How much is kept before it is looked through.

    Attributes:
        held: Twice the number of weights that PyTorch's cache may hold.
        notes: The number of notes.
    """

    held = 128
    notes = 1024


def _sweep() -> None:
    """Empty PyTorch's cache if it alone holds some weights, so that they are bounded by those in use."""
    held = epoch.held
    if any(_is_forgotten(held[place]) for place in range(0, len(held), 2)):
        forget_native_casts()
    _Limit.held = 2 * max(64, len(epoch.held))


def _is_forgotten(weight: Any) -> bool:
    # Held by the list, the argument of this function and that of the call in it, and by the weight's own C++ part, which
    # the graph of its cast holds; and by mezzo's own casts, where its kernels do the work of PyTorch's.
    shared = int(weight._use_count() > 1)
    return sys.getrefcount(weight) <= 4 + shared + times_kept(weight)


def _drop_old_notes() -> None:
    _Limit.held = 128
    if len(_notes) > _Limit.notes:
        for key in [key for key, note in list(_notes.items()) if note[2] < epoch.now - 1]:
            _notes.pop(key, None)
        _Limit.notes = 2 * max(512, len(_notes))


epoch.after_use.append(_drop_old_notes)


# A cast from outside would be a constant in what is written down, or be missed where checkpointing runs the code again.
_WRITING = ("torch.utils.checkpoint", "torch._subclasses", "torch.fx", "torch._functorch", "torch._export")


def _writes_down() -> bool:
    """Say whether calls are traced, transformed or recorded now, rather than just looked at by a mode of the user's."""
    if _tracing() is not None or _transforms() is not None:
        return True
    modes = (torch._C._get_dispatch_stack_at(place) for place in range(_modes()))
    return any(type(mode).__module__.startswith(_WRITING) for mode in modes)


def _device_type(args: Sequence[Any]) -> str:
    """Give the device type of the first tensor."""
    return next((tensor.device.type for tensor in tensors_in(args)), "cpu")


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Give the tensors among arguments, those in lists too."""
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                yield item
