"""Casts: which tensors may be cast, and a cast whose gradient can be differentiated again.

TensorPlay's ``Tensor.to`` loses the graph in its backward pass, so a gradient penalty through it raises. A hook before
that pass cures it: under ``create_graph`` the gradient is cast there, on the record, and the pass itself has nothing left
to do. That costs a microsecond; an autograd function in Python that casts costs seven.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorplay
from tensorplay import Tensor
from tensorplay.nn import Parameter

from mezzo.decision import widest
from mezzo.tensorplay.choke_points import replace_while_open
from mezzo.tensorplay.current import CURRENT
from mezzo.tensorplay.places import Place

__all__ = [
    "FLOAT32",
    "LOW",
    "DTYPE_SETS",
    "SEQUENCES",
    "cast",
    "dtype_name",
    "dtypes_in",
    "float_bits",
    "eligible_dtypes",
    "float_name",
    "floats",
    "hook_for",
    "named_dtype",
    "tensors_in",
    "watch_explicit_casts",
    "widest_name",
]

FLOAT32: Any = tensorplay.float32
LOW: dict[str, Any] = {"bfloat16": tensorplay.bfloat16, "float16": tensorplay.float16}
"""The lower-precision dtypes that a region can compute in."""

_to: Any = Tensor.to  # TensorPlay's own, whatever stands in its place while a region is open

_is_batched: Any = tensorplay._C._transform_is_batched

SEQUENCES = (list, tuple)
"""What arguments hold tensors in. A tuple: ``list | tuple`` in a function is made anew in every call."""


class _Kinds(dict[type, int]):
    """What an argument is, by its type: a tensor, a sequence or neither.

    ``isinstance(3, Tensor)`` takes three times as long as a look into a dictionary, for the class of ``Tensor`` is not
    ``type``. Of types that are not listed nothing is kept.
    """

    def __missing__(self, kind: type) -> int:
        if issubclass(kind, Tensor):
            return TENSOR
        return SEQUENCE if issubclass(kind, SEQUENCES) else 0


TENSOR, SEQUENCE = 1, 2
KIND = _Kinds(
    {Tensor: TENSOR, Parameter: TENSOR, list: SEQUENCE, tuple: SEQUENCE}
    | dict.fromkeys((int, float, bool, str, type(None), tensorplay.DType), 0)
)

_FLOATS = {"float64": tensorplay.float64, "float32": FLOAT32, **LOW}
_NAMES = {dtype: name for name, dtype in _FLOATS.items()}


def dtype_name(dtype: Any) -> str:
    """Name a dtype, as the core does.

    Args:
        dtype: One of TensorPlay's dtypes. Each look at ``tensor.dtype`` makes a new object, so they are compared with
            ``==`` and never with ``is``.

    Returns:
        Such as ``"bfloat16"``.

    Example:
        >>> import tensorplay
        >>> dtype_name(tensorplay.bfloat16)
        'bfloat16'
    """
    return _NAMES.get(dtype) or str(dtype).rpartition(".")[2]


float_name: Callable[[Any], str | None] = _NAMES.get
"""Names a floating dtype of 16 bits or more; None for others."""


def named_dtype(name: str) -> Any:
    """Give the dtype of a name: float64, float32, bfloat16 or float16."""
    return _FLOATS[name]


def eligible_dtypes(target: Any) -> tuple[Any, ...]:
    """Give the dtypes from which autocast casts to a target: the floating ones of 32 bits and less that are not it.

    They stand in the order in which they are likely to come.
    """
    return tuple(dtype for name, dtype in _FLOATS.items() if name != "float64" and dtype != target)


def _keep_graph(source: Any) -> Callable[[list[Any]], list[Any]]:
    def before_backward(gradients: list[Any]) -> list[Any]:
        gradient = gradients[0]
        if gradient is not None and gradient.requires_grad:
            return [cast(gradient, source)]
        return gradients

    return before_backward


_HOOKS = {dtype: _keep_graph(dtype) for dtype in _FLOATS.values()}


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

    A gradient penalty goes through them as well: ``model(x).float()`` in a region is what a loss begins with.
    """
    replace_while_open(Place(Tensor, "to", "to"), _keeping)


def _keeping(_label: str, function: Any) -> Any:
    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(tensor, *args, **kwargs)
        if result.requires_grad and CURRENT.plan is not None:
            source = tensor.dtype
            if source in _NAMES and result.dtype != source:
                result.grad_fn.add_pre_hook(_HOOKS[source])
        return result

    return functools.update_wrapper(to, function)


def tensors_in(value: Any) -> Iterator[Any]:
    """Give the tensors of a call's arguments, in order; lists, tuples and mappings are looked into.

    Args:
        value: An argument, or all of them.

    Yields:
        Tensors.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, SEQUENCES):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def floats(value: Any, device: str | None = None) -> list[str]:
    """Name the dtypes of the floating tensors among a call's arguments, float64 included.

    Args:
        value: The arguments.
        device: Only tensors on this device type; None for all.

    Returns:
        Dtype names, in order.
    """
    return [
        name
        for tensor in tensors_in(value)
        if (name := _NAMES.get(tensor.dtype)) is not None and (device is None or tensor.device.type == device)
    ]


_BITS = {dtype: 1 << index for index, dtype in enumerate(_FLOATS.values())}
DTYPE_SETS = tuple(frozenset(name for index, name in enumerate(_FLOATS) if bits >> index & 1) for bits in range(16))


def dtypes_in(args: Iterable[Any], kwargs: dict[str, Any], device: str | None = None) -> frozenset[str]:
    """Name the floating dtypes among a call's arguments, each once, at less cost than `floats`.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
        device: Only tensors on this device type; None for all.

    Returns:
        Dtype names; always the same object for the same ones.
    """
    bits = float_bits(args, device)
    return DTYPE_SETS[bits | float_bits(kwargs.values(), device) if kwargs else bits]


def float_bits(values: Iterable[Any], device: str | None = None) -> int:
    """Tell the floating dtypes among arguments, as the index of a set in `DTYPE_SETS`."""
    bits, last = 0, None
    for value in values:
        kind = KIND[type(value)]
        if kind == TENSOR:
            dtype = value.dtype
            # Most tensors of a call are alike, and comparing is cheaper than looking up.
            if last is not None and dtype == last:
                continue
            if device is None or value.device.type == device:
                last = dtype
                bits |= _BITS.get(dtype, 0)
        elif kind == SEQUENCE:
            bits |= float_bits(value, device)
    return bits


def widest_name(value: Any, low: str, device: str | None) -> str | None:
    """Name the dtype to which the ``promote`` policy casts; None if no tensor is eligible.

    Args:
        value: The arguments of a call.
        low: The region's dtype, by name.
        device: Only tensors on this device type; None for all.

    Returns:
        A dtype name.
    """
    return widest(floats(value, device), low)
