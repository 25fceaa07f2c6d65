"""A cast whose gradient can be differentiated again.

TensorPlay's ``Tensor.to`` loses the graph in its backward pass, so a gradient penalty through it raises. A hook before
that pass cures it: under ``create_graph`` the gradient is cast there, on the record, and the pass itself has nothing left
to do. That costs a microsecond; an autograd function in Python that casts costs seven.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorplay
from tensorplay import Tensor

from mezzo.tensorplay.choke_points import replace_while_open
from mezzo.tensorplay.current import CURRENT
from mezzo.tensorplay.dtypes import LOW, named_dtype
from mezzo.tensorplay.places import Place

__all__ = ["cast", "hook_for", "watch_explicit_casts"]

_to: Any = Tensor.to  # TensorPlay's own, whatever stands in its place while a region is open

_is_batched: Any = tensorplay._C._transform_is_batched


def _keep_graph(source: Any) -> Callable[[list[Any]], list[Any]]:
    def before_backward(gradients: list[Any]) -> list[Any]:
        gradient = gradients[0]
        if gradient is not None and gradient.requires_grad:
            return [cast(gradient, source)]
        return gradients

    return before_backward


_HOOKS = {named_dtype(name): _keep_graph(named_dtype(name)) for name in ("float64", "float32", *LOW)}


def hook_for(source: Any) -> Callable[[list[Any]], list[Any]]:
    """Give the hook that keeps a cast from a dtype differentiable again, for `cast`."""
    return _HOOKS[source]


def cast(tensor: Any, dtype: Any, hook: Callable[[list[Any]], list[Any]] | None = None) -> Any:
    """Cast a tensor, differentiably as often as one likes.

    Args:
        tensor: A floating tensor of any shape.
        dtype: Another floating dtype.
        hook: What `hook_for` gives for the tensor's dtype, where the caller knows it; asking costs time.

    Returns:
        A new tensor. Its gradient comes back in the tensor's own dtype.

    Example:
        >>> import tensorplay
        >>> x = tensorplay.tensor([3.0], requires_grad=True)
        >>> (slope,) = tensorplay.autograd.grad((cast(x, tensorplay.bfloat16) ** 3).sum(), x, create_graph=True)
        >>> float(tensorplay.autograd.grad(slope.sum(), x)[0])
        18.0
    """
    if _is_batched(tensor):
        return _cast_batched(tensor, dtype)
    result = _to(tensor, dtype)
    if result.requires_grad:
        result.grad_fn.add_pre_hook(hook or _HOOKS[tensor.dtype])
    return result


def _cast_batched(tensor: Any, dtype: Any) -> Any:
    """Cast a tensor inside of `tensorplay.func.vmap`, which has no rule for casts: the one that holds the whole batch."""
    level = tensorplay._C._transform_batch_level(tensor)
    whole, batch_dim = tensorplay._C._transform_unwrap(tensor, level)
    return tensorplay._C._transform_make_batched(cast(whole, dtype), batch_dim, level)


def watch_explicit_casts() -> None:
    """Have the program's own casts keep their graph too while a region is open; called once, when the adapter is imported.

    A gradient penalty goes through them as well: ``model(x).float()`` in a region is what a loss begins with, or a region
    inside of it in which nothing is cast.
    """
    replace_while_open(Place(Tensor, "to", "to"), _keeping)
    replace_while_open(Place(Tensor, "type_as", "type_as"), _recording)


def _keeping(_label: str, function: Any) -> Any:
    def cast_by_hand(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_batched(tensor):
            return _cast_batched_by_hand(function, tensor, *args, **kwargs)
        result = function(tensor, *args, **kwargs)
        if result.requires_grad and CURRENT.kept is not None:
            source, target = tensor.dtype, result.dtype
            if source != target and source in _HOOKS and target in _HOOKS:
                result.grad_fn.add_pre_hook(_HOOKS[source])
        return result

    return functools.update_wrapper(cast_by_hand, function)


def _cast_batched_by_hand(function: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Cast what a mapped function casts, where that is all that is asked; TensorPlay itself cannot."""
    target = next((value for value in args if isinstance(value, tensorplay.DType)), kwargs.get("dtype"))
    source = tensor.dtype
    if CURRENT.kept is None or source not in _HOOKS or target not in _HOOKS or source == target:
        return function(tensor, *args, **kwargs)
    return cast(tensor, target)


def _recording(_label: str, function: Any) -> Any:
    """Make ``x.type_as(y)`` a cast by ``to``: TensorPlay's has no gradient where dtypes differ."""

    def type_as(tensor: Any, other: Any) -> Any:
        if CURRENT.kept is None or tensor.dtype not in _HOOKS or other.dtype not in _HOOKS:
            return function(tensor, other)
        return tensor.to(other.dtype) if tensor.device.type == other.device.type else function(tensor, other)

    return functools.update_wrapper(type_as, function)
