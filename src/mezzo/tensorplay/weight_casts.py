"""The kept casts of weights: a large weight that is used again in a region need not be cast again.

What is kept is the lower-precision values alone, never a piece of the graph: TensorPlay's autograd forgets a node that one
backward pass has gone through, and what a second one should have added is silently lost. So each use has a node of its
own, and gradients of several uses are summed in the weight's dtype. A node from Python costs about as much as casting a
hundred thousand numbers, and a smaller weight is simply cast again.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import tensorplay
import tensorplay.utils
from tensorplay import Tensor
from tensorplay.nn import Parameter

from mezzo.tensorplay.casting import cast
from mezzo.tensorplay.choke_points import replace_while_open
from mezzo.tensorplay.current import CURRENT
from mezzo.tensorplay.places import Place

__all__ = ["SMALLEST", "WeightCasts", "is_weight", "watch_memory"]

SMALLEST = 2**17
"""From how many elements on a weight's cast is kept: 131072, where casting again takes as long as a node from Python."""


class _Use(tensorplay.autograd.Function):  # type: ignore[misc]
    """A use of a kept cast: the kept values forward, a cast of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, weight: Any, low: Any) -> Any:
        ctx.source = weight.dtype
        return low.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return cast(gradient, ctx.source), None


class _Kept(NamedTuple):
    """A kept cast, and how to tell that it is still the weight's.

    Attributes:
        weight: A weak reference to the weight.
        state: The weight's version, address, shape and strides when it was cast.
        low: The cast.
        version: The version of the cast then.
    """

    weight: Any
    state: tuple[Any, ...]
    low: Any
    version: int


class WeightCasts:
    """The kept casts of one thread.

    A cast is served as long as the weight is the same tensor, in the same storage, unchanged as its version counter tells.
    Writing through ``weight.data``, NumPy or DLPack does not move that counter, so a weight whose memory was given away so
    in the region is cast each time from then on. What shares a weight's memory and was made outside is not seen.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], _Kept] = {}
        self._shared: set[int] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def drop(self) -> None:
        """Drop all casts."""
        self._kept.clear()

    def clear(self) -> None:
        """Drop all casts, and what is known of shared memory."""
        self._kept.clear()
        self._shared.clear()

    def never_keep(self, tensor: Any) -> None:
        """Keep no cast of what is where a tensor is, or a view of it: its memory can be written to unseen."""
        self._shared.add(tensor.untyped_storage().data_ptr())

    def take(self, weight: Any, dtype: Any, label: str) -> Any:
        """Cast a weight, or use the cast that is kept.

        Args:
            weight: A leaf tensor that requires a gradient, or a `Parameter`.
            dtype: The dtype to cast to.
            label: The dtype's name.

        Returns:
            The weight in that dtype; its gradient goes to the weight.
        """
        if weight.untyped_storage().data_ptr() in self._shared:
            return cast(weight, dtype)
        if weight.is_inference() or tensorplay.autograd.is_inference_mode_enabled():
            return cast(weight, dtype)  # such tensors count no versions, and must not be found by a training pass
        key = (id(weight), label)
        state = weight._version, weight.data_ptr(), tuple(weight.shape), tuple(weight.stride())
        kept = self._kept.get(key)
        if kept is not None and kept.weight() is weight and kept.state == state and self._is_untouched(kept):
            low = kept.low
            if weight.requires_grad and tensorplay.is_grad_enabled():
                return _Use.apply(weight, low)
            return low
        result = cast(weight, dtype)
        low = result.detach()
        self._kept[key] = _Kept(weakref.ref(weight, lambda _: self._kept.pop(key, None)), state, low, low._version)
        return result

    def _is_untouched(self, kept: _Kept) -> bool:
        """Say whether a kept cast, which has been handed out, is what it was."""
        return kept.low._version == kept.version and kept.low.untyped_storage().data_ptr() not in self._shared


def is_weight(tensor: Any) -> bool:
    """Say whether the cast of a tensor is worth keeping: a large leaf that is trained, or a parameter."""
    if tensor.numel() < SMALLEST:
        return False
    return (tensor.requires_grad and tensor.is_leaf) or type(tensor) is Parameter


def watch_memory() -> None:
    """Have it seen, whenever a region is open, that a tensor's memory is given away; called once, at import."""
    replace_while_open(Place(Tensor, "data", "data"), _watching_data)
    for name in ("numpy", "__array__", "__dlpack__"):
        replace_while_open(Place(Tensor, name, name), _watching_method)
    replace_while_open(Place(tensorplay.utils, "swap_tensors", "swap_tensors"), _forgetting)


def _watching_data(_name: str, data: Any) -> Any:
    def read(tensor: Any) -> Any:
        if (kept := CURRENT.kept) is not None:
            kept.never_keep(tensor)
        return data.fget(tensor)

    def write(tensor: Any, value: Any) -> None:
        data.fset(tensor, value)
        if (kept := CURRENT.kept) is not None:
            kept.never_keep(tensor)

    return property(read, write, data.fdel, data.__doc__)


def _watching_method(_name: str, method: Any) -> Any:
    def give(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if (kept := CURRENT.kept) is not None:
            kept.never_keep(tensor)
        return method(tensor, *args, **kwargs)

    return functools.update_wrapper(give, method)


def _forgetting(_name: str, swap_tensors: Any) -> Any:
    """Let go of the tensors that are swapped, which must have no weak references."""

    def swap(*args: Any, **kwargs: Any) -> Any:
        if (kept := CURRENT.kept) is not None:
            kept.drop()
        return swap_tensors(*args, **kwargs)

    return functools.update_wrapper(swap, swap_tensors)


def _prepare_functions() -> None:
    """Call an autograd function once with a tensor that is no `Parameter`.

    In TensorPlay 1.0.0 the outputs of all functions of a process require no gradient if the first argument of the first
    call was a `Parameter`.
    """
    plain = tensorplay.zeros(1).requires_grad_()
    _Use.apply(plain, plain.detach())


_prepare_functions()
