"""Calls of TensorPlay's ops for the measurements: PyTorch's op database carried over, and the sample calls of the tests."""
# ruff: noqa: SLF001 - TensorPlay's ops live in tensorplay._C

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from typing import Any

import numpy as np
import tensorplay
from tensorplay import Tensor
from tensorplay_trials import in_child
from tests.tensorplay.op_calls import CALLS
from tests.tensorplay.op_samples import Call, floats

__all__ = ["OPS", "all_calls"]

OPS = {name.split(".")[0] for name in tensorplay._C._dispatch_ops() if "::" not in name}
"""The base names of the package's ops."""

OPERATORS = ["__pow__", "__rpow__", "__matmul__"]
MOST = 6  # samples of an op
LARGEST = 20_000  # numbers in a sample


def all_calls() -> dict[str, list[Call]]:
    """Collect calls of as many ops as can be made: those that PyTorch's samples come to, then those of the tests.

    Returns:
        Op to its calls, which differ in more than sizes.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        database = pool.submit(_database).result()
    found: dict[str, dict[str, Call]] = {}
    for name, samples in database.items():
        for sample in samples:
            for call in in_child(_reached, name, sample) or []:
                kept = found.setdefault(call.op, {})
                if len(kept) < MOST:
                    kept.setdefault(_structure((call.args, call.kwargs)), call)
    calls = {op: list(kept.values()) for op, kept in found.items()}
    for op, call in CALLS.items():
        calls.setdefault(op, []).insert(0, call)
    return {op: made for op, made in sorted(calls.items()) if op in OPS}


def _database() -> dict[str, list[Any]]:
    """Give PyTorch's samples as NumPy arrays; in a process of its own, so that PyTorch's threads are not here."""
    import torch  # noqa: PLC0415
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    samples: dict[str, list[Any]] = {}
    for op in op_db:
        kept: dict[str, Any] = {}
        try:
            for sample in islice(op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=False), 80):
                tree = _plain((sample.input, sample.args, sample.kwargs))
                if tree and 0 < sum(array.size for array in floats(tree)) < LARGEST and len(kept) < MOST:
                    kept.setdefault(_structure(tree), tree)
        except Exception as error:  # noqa: BLE001 - it cannot be made here
            print(f"no more samples of {op.name}: {error}", file=sys.stderr)
        samples.setdefault(op.name, []).extend(kept.values())
    return samples


def _plain(tree: Any) -> Any:
    """Turn tensors into arrays; None if some argument has no counterpart in TensorPlay."""
    from torch.utils._pytree import tree_flatten, tree_unflatten  # noqa: PLC0415

    leaves, shape = tree_flatten(tree)
    for place, leaf in enumerate(leaves):
        if hasattr(leaf, "layout"):
            if "strided" not in str(leaf.layout):
                return None
            leaves[place] = np.array(leaf.detach().resolve_conj().resolve_neg().numpy())
        elif leaf is not None and not isinstance(leaf, int | float | complex | str | slice):
            return None
    return tree_unflatten(leaves, shape)


def _structure(value: Any) -> str:
    """Spell what a call is like, apart from sizes and numbers."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype.kind}{value.ndim}{'' if value.size else 'empty'}"
    if isinstance(value, dict):
        return str({key: _structure(item) for key, item in sorted(value.items())})
    if isinstance(value, list | tuple):
        return str([_structure(item) for item in value])
    return str(value) if isinstance(value, str | bool) else type(value).__name__


def _reached(name: str, sample: Any) -> list[Call]:
    """Call everything in TensorPlay that has a PyTorch op's name, and note the ops that it comes to with float tensors."""
    reached: list[Call] = []
    _watch(reached)
    first, args, kwargs = sample
    for function in _of_this_name(name):
        try:
            function(_tensors(first), *_tensors(args), **_tensors(kwargs))
        except Exception:  # noqa: BLE001 - not all of PyTorch's calls are TensorPlay's
            continue
    return [call for call in reached if floats((call.args, call.kwargs))]


def _of_this_name(name: str) -> Iterator[Callable[..., Any]]:
    *space, plain = name.split(".")
    place: Any = tensorplay
    for part in space:
        place = getattr(place, part, None)
    prefix = f"{space[0]}_" if space and space[0] != "nn" else ""
    places = [(place, plain), (tensorplay._C, prefix + plain)]
    if not space:
        places += [(Tensor, plain), (Tensor, f"{plain}_")]
    yield from (function for where, what in places if callable(function := getattr(where, what, None)))


def _watch(reached: list[Call]) -> None:
    """Note the calls of ops at the names through which Python code reaches them, the outermost ones only."""
    inside = [False]

    def watched(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return function(*args, **kwargs)
            inside[0] = True
            try:
                noted = _arrays((args, kwargs))
                result = function(*args, **kwargs)
            finally:
                inside[0] = False
            if noted is not None:
                reached.append(Call(op, *noted))
            return result

        return call

    for place in (tensorplay._C, Tensor):
        for op in [*OPS, *OPERATORS]:
            if callable(function := getattr(place, op, None)):
                canonical = {"__pow__": "pow", "__rpow__": "pow", "__matmul__": "matmul"}.get(op, op)
                setattr(place, op, watched(canonical, function))


def _tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tensorplay.from_numpy(np.array(value)) if value.ndim else tensorplay.tensor(value)
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    return [_tensors(item) for item in value] if isinstance(value, list | tuple) else value


def _arrays(value: Any) -> Any:
    """Take the tensors of a call as they are before it; None where an argument cannot be kept."""
    if isinstance(value, Tensor):
        return np.array(value.detach().numpy())
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_arrays, value)) if isinstance(value, tuple) else list(map(_arrays, value))
    return value
