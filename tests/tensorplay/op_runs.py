"""Running the sample calls inside and outside regions, and what to expect of the result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import tensorplay

from mezzo import tables
from tests.tensorplay.op_calls import CALLS, function_of, make
from tests.tensorplay.op_samples import floats

__all__ = ["HALVES", "NO_KERNEL", "ROUNDING", "distance", "dtype_names", "numbers", "outcome", "run", "tensor_count"]

HALVES = (tensorplay.bfloat16, tensorplay.float16)
NO_KERNEL = frozenset({"mkldnn_rnn_layer"})
"""Ops of the tables that this build of the package cannot run in any dtype."""

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def run(op: str, dtypes: Sequence[Any], region: AbstractContextManager[Any] | None = None) -> list[Any]:
    """Make the sample call of an op.

    Args:
        op: Its name.
        dtypes: The dtype of each float tensor; the last one serves the rest.
        region: A region to make it in.

    Returns:
        The floating and complex tensors of the result.
    """
    args, kwargs, _ = make(CALLS[op], dtypes)
    with region or nullcontext():
        return outcome(function_of(op)(*args, **kwargs))


def outcome(result: Any) -> list[Any]:
    """List the floating and complex tensors of a result, in order."""
    if isinstance(result, tensorplay.Tensor):
        return [result] if result.is_floating_point() or result.is_complex() else []
    return [leaf for branch in result for leaf in outcome(branch)] if isinstance(result, list | tuple) else []


def dtype_names(tensors: list[Any]) -> list[str]:
    """Name the dtypes of tensors of either framework."""
    return [str(tensor.dtype).split(".")[-1] for tensor in tensors]


def numbers(tensor: Any) -> Any:
    """Give a tensor's numbers in double precision, of either framework's tensors."""
    tensor = tensor.detach()
    package = tensorplay if isinstance(tensor, tensorplay.Tensor) else __import__("torch")
    return np.array(tensor.to(package.complex128 if tensor.is_complex() else package.float64).numpy())


def distance(found: Any, wanted: Any) -> float:
    """Give the largest difference of two tensors, by the largest number that is wanted, at least one thousandth."""
    mine, right = numbers(found), numbers(wanted)
    assert mine.shape == right.shape
    if not right.size:
        return 0.0
    equal = (mine == right) | (np.isnan(mine) & np.isnan(right))
    finite = np.abs(right[np.isfinite(right)])
    scale = max(float(finite.max(initial=0)), 1e-3)
    return float(np.where(equal, 0, np.abs(mine - right)).max()) / scale


def tensor_count(op: str) -> int:
    """Count the float tensors of an op's sample call."""
    call = CALLS[op]
    return len(floats([call.args, call.kwargs]))


def lacks(op: str, half: str) -> bool:
    """Say whether the table of repairs has no kernel of the op for a low dtype."""
    return half in tables.lacking("tensorplay").get(op, frozenset())
