"""mezzo's kernels against PyTorch's over PyTorch's op database, wherever a call passes through a listed op."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

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


def both_ways(
    device: str, low: torch.dtype, calls: Iterable[Call], run: Callable[..., Outcome]
) -> tuple[list[tuple[str, Outcome, Outcome]], set[str]]:
    """Give what PyTorch's kernels and mezzo's do with each call that passes through a listed op, and all of these ops.

    First all calls are served by mezzo, which is what tells the few that matter; to begin and to end that costs as much
    as some calls.
    """
    reached, mine, hits = [], set(), set()
    with served_by_mezzo(device, mine):
        for call in calls:
            mine.clear()
            _, op, args, kwargs, mode = call
            with mode, autocast_state(device, low):
                served = run(op, args, kwargs)
            if mine:
                hits |= mine
                reached.append((call, served))
    found = []
    for (name, op, args, kwargs, mode), served in reached:
        with mode, autocast_state(device, low):
            found.append((name, run(op, args, kwargs), served))
    return found, hits


@pytest.mark.slow
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.filterwarnings("ignore")
def test_every_listed_call_agrees_on_cpu(pairing: str, low: torch.dtype) -> None:
    calls = ((name, op, *paired(sample, pairing, low), nullcontext()) for name, op, sample in samples())
    wrong, compared = [], 0
    found, hits = both_ways("cpu", low, calls, outcome)
    for name, native, served in found:
        # Where PyTorch raises there is nothing to agree with: promote depends on the order of arguments there.
        if native.error is None:
            compared += 1
            wrong += [f"{name}: {text}" for text in differences(native, served, rtol=TOLERANCES.get(name, 0.0))]
    assert not wrong, "\n".join(wrong)
    assert compared > 150
    assert len(hits) > 70, sorted(hits)


def fakes(device: str, low: torch.dtype) -> Iterator[Call]:
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


@pytest.mark.slow
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "mtia"])
@pytest.mark.filterwarnings("ignore")
def test_every_listed_call_agrees_in_dtype_on_fake_tensors(
    device: str, low: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    # An error is an outcome here, and one with a traceback in the log takes as long as several calls.
    caplog.set_level(logging.CRITICAL, logger="torch._subclasses.fake_tensor")
    wrong, compared = [], 0
    with torch.no_grad():
        found, hits = both_ways(device, low, fakes(device, low), run)
    for name, native, served in found:
        if native.error is None:
            compared += 1
            wrong += [f"{name}: {text}" for text in differences(native, served, values=False)]
    assert not wrong, "\n".join(wrong)
    assert compared > 150
    assert len(hits) > 60, sorted(hits)


def run(op: Any, args: Any, kwargs: Any) -> Outcome:
    try:
        return Outcome(value=op(*args, **kwargs))
    except Exception as error:
        return Outcome(error=error)
