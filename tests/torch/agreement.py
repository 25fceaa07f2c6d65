"""Comparing mezzo's kernels with PyTorch's over PyTorch's op database, wherever a call passes through a listed op.

Kernels of mezzo's that have been registered stay, and serve plain regions too. So this is run as a program, in a process in
which none has been: ``python -m tests.torch.agreement DEVICES`` first makes all calls natively, then all by mezzo's.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from mezzo.torch.kernels import installed_kernels

from .served import Outcome, autocast_state, differences, outcome, served_by_mezzo

LOW = (torch.bfloat16, torch.float16)
SAMPLES = 4

# Calls whose result is not a function of their arguments: memory that nobody has written, or random numbers that do not
# follow the seed.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# Slow out of all proportion, and reaching no listed op that others do not.
SLOW = {"nn.functional.max_unpool3d", "svd_lowrank", "pca_lowrank", "nn.functional.ctc_loss"}

# LAPACK's gelsy differs from call to call, with the address of its workspace: by 2e-7 over 300 native calls.
TOLERANCES = {"linalg.lstsq": 1e-5}

PAIRINGS = ("float32", "low", "first low", "float64 first")


@cache
def samples() -> list[tuple[str, Any, Any]]:
    """Give the first samples of every op that runs in float32 on the CPU."""
    found = []
    for op in op_db:
        if op.name in UNDEFINED | SLOW or torch.float32 not in op.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        # Not `op.sample_inputs`: that one walks the call stack for a unittest at every op, which takes minutes.
        made = op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=False)
        found += [(op.name, op.op, sample) for sample in islice(made, SAMPLES)]
    return found


def paired(sample: Any, pairing: str, low: torch.dtype) -> tuple[Any, Any]:
    """Give a sample's arguments with the dtypes of a pairing."""
    seen = 0

    def convert(value: Any) -> Any:
        nonlocal seen
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return value
        seen += 1
        if pairing == "low" or (pairing == "first low" and seen == 1):
            return value.to(low)
        return value.double() if pairing == "float64 first" and seen == 1 else value

    return tree_map(convert, ([sample.input, *sample.args], dict(sample.kwargs)))


# The name and the function of a sample, what it is called with, and the mode that it runs in.
Call = tuple[str, Any, Any, Any, AbstractContextManager[Any]]


def on_cpu(low: torch.dtype, pairing: str) -> Iterator[Call]:
    """Give every sample's call on the CPU."""
    for name, op, sample in samples():
        yield name, op, *paired(sample, pairing, low), nullcontext()


def on_fakes(device: str, low: torch.dtype) -> Iterator[Call]:
    """Give every sample's call on tensors without data, on a device that need not be there."""
    for name, op, sample in samples():
        mode = FakeTensorMode()

        def convert(value: Any, mode: FakeTensorMode = mode) -> Any:
            if not isinstance(value, torch.Tensor):
                return torch.device(device) if isinstance(value, torch.device) else value
            with mode:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

        leaves = [
            leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        if all(leaf.layout is torch.strided for leaf in leaves):
            args, kwargs = tree_map(convert, paired(sample, "first low", low))
            yield name, op, args, kwargs, mode


def run(op: Any, args: Any, kwargs: Any) -> Outcome:
    try:
        return Outcome(value=op(*args, **kwargs))
    except Exception as error:
        return Outcome(error=error)


def outcomes(device: str, low: torch.dtype, calls: list[Call], hits: list[set[str]] | None) -> list[Outcome]:
    """Make all calls; by mezzo's kernels if ``hits`` is given, which then gets the ops served in each."""
    mine: set[str] = set()
    call_it = outcome if device == "cpu" else run
    made = []
    with served_by_mezzo(device, mine) if hits is not None else nullcontext():
        for _, op, args, kwargs, mode in calls:
            mine.clear()
            with mode, autocast_state(device, low):
                made.append(call_it(op, args, kwargs))
            if hits is not None:
                hits.append(set(mine))
    return made


Report = dict[str, dict[str, Any]]


def main(devices: list[str]) -> dict[str, Report]:
    """Compare all calls on some devices.

    Returns:
        By device, then by dtype and pairing: what differs, how many calls were compared, and how many listed ops they
        reached.
    """
    # On all devices before a kernel is registered for any.
    natively = {device: list(_natively(device)) for device in devices}
    assert not any(installed_kernels(device) for device in devices)
    return {device: _by_mezzo(device, natively.pop(device)) for device in devices}


def _natively(device: str) -> Iterator[tuple[torch.dtype, str, list[Call], list[Outcome]]]:
    """Make all calls, for each dtype and pairing."""
    for low in LOW:
        for pairing in PAIRINGS if device == "cpu" else ("first low",):
            calls = list(on_cpu(low, pairing) if device == "cpu" else on_fakes(device, low))
            with _gradients(device):
                yield low, pairing, calls, outcomes(device, low, calls, None)


def _by_mezzo(device: str, natively: list[tuple[torch.dtype, str, list[Call], list[Outcome]]]) -> Report:
    report = {}
    while natively:  # what has been compared is let go
        low, pairing, calls, native = natively.pop(0)
        hits: list[set[str]] = []
        with _gradients(device):
            served = outcomes(device, low, calls, hits)
            report[f"{low}, {pairing}"] = _compare(device, calls, native, served, hits)
    return report


def _gradients(device: str) -> AbstractContextManager[Any]:
    return torch.no_grad() if device != "cpu" else nullcontext()


def _compare(
    device: str, calls: list[Call], natively: list[Outcome], served: list[Outcome], hits: list[set[str]]
) -> dict[str, Any]:
    wrong, compared = [], 0
    for (name, *_), native, mine, ops in zip(calls, natively, served, hits, strict=True):
        # Where PyTorch raises there is nothing to agree with: promote depends on the order of arguments there.
        if ops and native.error is None:
            compared += 1
            found = differences(native, mine, values=device == "cpu", rtol=TOLERANCES.get(name, 0.0))
            wrong += [f"{name}: {text}" for text in found]
    return {"wrong": wrong, "compared": compared, "ops": len(set().union(*hits))}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # An error is an outcome here, and one with a traceback in the log takes as long as several calls.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    print(json.dumps(main(sys.argv[1:])))
