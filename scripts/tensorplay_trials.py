"""Trials: a call of a TensorPlay op in given dtypes, in a child process since it may end the interpreter."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorplay

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.tensorplay.op_samples import Call, floats

__all__ = ["LOW", "WIDTH", "Trial", "attempt", "difference", "float_count", "in_child", "mixes"]

LOW = ("bfloat16", "float16")
WIDTH = {"float64": 3, "float32": 2, "bfloat16": 1, "float16": 0}
"""Floating dtypes by how wide they are."""


@dataclass
class Trial:
    """What a call gave.

    Attributes:
        dtypes: The dtype of each tensor of the result.
        values: Each floating one as float64.
        gradients: By float input: its gradient's dtype and value, None without one. None if nothing has a gradient.
        error: The text of what was raised.
        backward: The text of what the backward raised.
    """

    dtypes: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    gradients: list[tuple[str, Any] | None] | None = None
    error: str = ""
    backward: str = ""


def in_child(function: Callable[..., Any], *args: Any, seconds: float = 30) -> Any:
    """Call a function in a forked child, which may die.

    Args:
        function: What to call; its result has to pickle.
        *args: Its arguments.
        seconds: How long it may take.

    Returns:
        The result; None if the child died, raised or was too slow.
    """
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1), os.dup2(silence, 2)
        try:
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(function(*args), pipe)
        finally:
            os._exit(0)
    os.close(writing)
    parts, end = [], time.monotonic() + seconds
    while select.select([reading], [], [], max(0, end - time.monotonic()))[0]:
        if not (part := os.read(reading, 1 << 16)):
            break
        parts.append(part)
    else:
        os.kill(child, signal.SIGKILL)
        parts.clear()
    os.close(reading)
    os.waitpid(child, 0)
    try:
        return pickle.loads(b"".join(parts))
    except (EOFError, pickle.UnpicklingError):
        return None


def attempt(call: Call, dtypes: Sequence[str], *, wide: str = "", region: str = "", grad: bool = True) -> Trial:
    """Make a call.

    Args:
        call: The call.
        dtypes: The dtype of each of its float tensors.
        wide: Widen these numbers to this dtype, for what the call should give.
        region: Make it under the package's own autocast on the CPU, to this dtype.
        grad: Whether the float tensors ask for gradients, and the backward is run.

    Returns:
        What came of it.
    """
    from tests.tensorplay.op_calls import float_tensors, make  # noqa: PLC0415

    tensorplay.manual_seed(0)
    named = [getattr(tensorplay, dtype) for dtype in dtypes]
    args, kwargs, leaves = make(call, named)
    if wide:
        rounded = [leaf.to(getattr(tensorplay, wide)) for leaf in leaves]
        args, kwargs = _replaced((args, kwargs), dict(zip(map(id, leaves), rounded, strict=True)))
        leaves = rounded
    if grad:
        for leaf in leaves:
            leaf.requires_grad_()
    if grad and call.op.endswith("_"):
        args = [args[0].clone(), *args[1:]]
    trial = Trial()
    try:
        with tensorplay.autocast("cpu", dtype=getattr(tensorplay, region)) if region else nullcontext():
            result = _made(call.op, args, kwargs)
        trial.dtypes = [_name(tensor.dtype) for tensor in _all_tensors(result)]
        outs = float_tensors(result)
        trial.values = [_number(out) for out in outs]
    except Exception as error:  # noqa: BLE001 - any may come, and is what is asked about
        trial.error = f"{type(error).__name__}: {error}"[:200]
        return trial
    if grad and (outs := [out for out in outs if out.requires_grad]):
        _differentiate(trial, outs, leaves)
    return trial


def _made(op: str, args: Any, kwargs: Any) -> Any:
    """Call an op; its method takes some arguments that the function of the extension module does not."""
    from tests.tensorplay.op_calls import function_of  # noqa: PLC0415

    try:
        return function_of(op)(*args, **kwargs)
    except TypeError:
        if (method := getattr(tensorplay.Tensor, op, None)) is None:
            raise
        return method(*args, **kwargs)


def _differentiate(trial: Trial, outs: list[Any], leaves: list[Any]) -> None:
    try:
        total = tensorplay.zeros([], dtype=tensorplay.float64)
        for place, out in enumerate(outs):
            weights = np.cos(np.arange(out.numel()) * 1.7 + place + 0.5).reshape(tuple(out.shape))
            total = total + (out * tensorplay.tensor(weights).to(out.dtype)).sum().to(tensorplay.float64)
        total.backward()
        trial.gradients = [None if x.grad is None else (_name(x.grad.dtype), _number(x.grad)) for x in leaves]
    except Exception as error:  # noqa: BLE001 - any may come, and is what is asked about
        trial.backward = f"{type(error).__name__}: {error}"[:200]


def mixes(count: int) -> Iterator[tuple[str, ...]]:
    """Give the dtypes to try: all alike, and one unlike the rest.

    Args:
        count: How many float tensors there are.

    Yields:
        The dtype of each.
    """
    seen = {("float32",) * count}
    pairs = [(a, b) for a in WIDTH for b in WIDTH]
    for first, rest in sorted(pairs, key=lambda pair: pair[0] != pair[1]):
        for place in range(min(count, 5)):
            mix = tuple(first if place == i else rest for i in range(count))
            if mix not in seen:
                seen.add(mix)
                yield mix


def difference(found: Any, wanted: Any) -> float:
    """Compare two arrays.

    Args:
        found: What came.
        wanted: What should have come.

    Returns:
        The largest difference by the largest number; infinite where one is not finite and the other is.
    """
    finite = np.isfinite(wanted)
    if found.shape != wanted.shape or (np.isfinite(found) != finite).any():
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(found[finite] - wanted[finite]).max() / (np.abs(wanted[finite]).max() + 1e-3))


def float_count(call: Call) -> int:
    """Count the float tensors of a call.

    Args:
        call: The call.

    Returns:
        How many.
    """
    return len(floats((call.args, call.kwargs)))


def _replaced(tree: Any, by: dict[int, Any]) -> Any:
    if isinstance(tree, dict):
        return {name: _replaced(value, by) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_replaced(value, by) for value in tree]
    return by.get(id(tree), tree)


def _all_tensors(result: Any) -> list[Any]:
    if isinstance(result, tensorplay.Tensor):
        return [result]
    return [leaf for branch in result for leaf in _all_tensors(branch)] if isinstance(result, list | tuple) else []


def _name(dtype: Any) -> str:
    return str(dtype).split(".")[-1]


def _number(tensor: Any) -> Any:
    return np.array(tensor.detach().to(tensorplay.float64).numpy())
