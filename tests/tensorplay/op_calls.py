"""A sample call for each op of TensorPlay's tables and repairs, made through the names that mezzo wraps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorplay

from tests.tensorplay.op_calls_elements import ELEMENTS
from tests.tensorplay.op_calls_linalg import LINALG
from tests.tensorplay.op_calls_losses import LOSSES
from tests.tensorplay.op_calls_mixing import MIXING
from tests.tensorplay.op_calls_products import PRODUCTS
from tests.tensorplay.op_samples import Call, floats

__all__ = ["CALLS", "float_tensors", "function_of", "make"]

CALLS: dict[str, Call] = {call.op: call for call in [*PRODUCTS, *LOSSES, *ELEMENTS, *LINALG, *MIXING]}
"""Op to its sample call."""


def function_of(op: str) -> Any:
    """Look up the function that runs an op, as of now.

    Args:
        op: Canonical name.

    Returns:
        ``tensorplay._C``'s function of this name, or else the method of ``Tensor``.
    """
    return getattr(tensorplay._C, op, None) or getattr(tensorplay.Tensor, op)


def make(call: Call, dtypes: Sequence[Any], *, grad: bool = False) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Make the arguments of a call.

    Args:
        call: The call.
        dtypes: The dtype of each of its float tensors; the last one serves the rest.
        grad: Whether these ask for gradients.

    Returns:
        Positional arguments, keyword arguments, and the float tensors in order.
    """
    arrays = floats([call.args, call.kwargs])
    chosen = [dtypes[min(place, len(dtypes) - 1)] for place in range(len(arrays))]
    tensors = [tensor_of(array).to(dtype).requires_grad_(grad) for array, dtype in zip(arrays, chosen, strict=True)]
    left = iter(tensors)
    return _filled(list(call.args), left), _filled(call.kwargs, left), tensors


def tensor_of(array: Any) -> Any:
    """Make a tensor that shares nothing with an array.

    Args:
        array: The array.

    Returns:
        A tensor of its dtype.
    """
    return tensorplay.from_numpy(np.array(array)) if array.ndim else tensorplay.tensor(array)


def float_tensors(result: Any) -> list[Any]:
    """List the floating tensors of a result.

    Args:
        result: What an op gave.

    Returns:
        The tensors, in order.
    """
    if isinstance(result, tensorplay.Tensor):
        return [result] if result.is_floating_point() else []
    return [leaf for branch in result for leaf in float_tensors(branch)] if isinstance(result, list | tuple) else []


def _filled(tree: Any, left: Iterator[Any]) -> Any:
    if isinstance(tree, np.ndarray):
        return next(left) if tree.dtype == np.float32 else tensor_of(tree)
    if isinstance(tree, dict):
        return {name: _filled(value, left) for name, value in tree.items()}
    return [_filled(value, left) for value in tree] if isinstance(tree, list | tuple) else tree
