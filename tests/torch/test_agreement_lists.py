"""mezzo's kernels against PyTorch's over PyTorch's own autocast test lists: same dtype, same value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils._pytree import tree_map, tree_map_only

from mezzo.torch.policies import policy_on

from .served import Outcome, autocast_state, differences, outcome, served_by_mezzo

LOW = (torch.bfloat16, torch.float16)
LISTS = {"cpu lists": AutocastCPUTestLists, "accelerator lists": AutocastTestLists}

# What cannot run as the lists have it: cuDNN's ops on a CPU build, and einsum, whose arguments there are no call of it.
CANNOT_RUN = {"cudnn_convolution", "cudnn_convolution_transpose", "einsum"}


def calls(lists: Any) -> list[tuple[str, str, Any, Any, Any]]:
    """Give (list, op name, callable, args, kwargs) for every entry of a test list that can be called."""
    found = []
    for attribute, entries in vars(lists).items():
        for name, args, *rest in entries:
            kwargs = next((item for item in rest if isinstance(item, dict)), {})
            places = {"nn": torch._C._nn, "methods": torch.Tensor}
            places = [v for k, v in places.items() if attribute.startswith(k)] or [torch, torch._C._nn, torch.Tensor]
            for place in places:
                if hasattr(place, name) and name not in CANNOT_RUN:
                    found.append((attribute, name, getattr(place, name), args, kwargs))
                    break
    return found


@pytest.fixture(scope="module", params=list(LISTS))
def entries(request: pytest.FixtureRequest) -> list[Any]:
    torch.manual_seed(0)
    found = calls(LISTS[request.param](torch.device("cpu")))
    assert len(found) > 50
    return found


def with_low(args: Any, low: torch.dtype) -> Any:
    """Give the arguments in the other lower-precision dtype where the lists have one of the two."""
    swap = {torch.bfloat16, torch.float16}
    return tree_map_only(torch.Tensor, lambda t: t.to(low) if t.dtype in swap else t, args)


@pytest.mark.parametrize("low", LOW)
def test_every_entry_agrees_on_cpu(entries: list[Any], low: torch.dtype) -> None:
    wrong, ran, hits = [], 0, set()
    for attribute, name, call, args, kwargs in entries:
        args = with_low(args, low)
        with autocast_state("cpu", low):
            native = outcome(call, args, kwargs)
            if native.error is not None:
                continue
            with served_by_mezzo("cpu", hits):
                served = outcome(call, args, kwargs)
        ran += 1
        wrong += [f"{attribute}.{name}: {text}" for text in differences(native, served)]
    assert not wrong, "\n".join(wrong)
    assert ran > 45
    assert len(hits) > 25


def fake(value: Any, mode: FakeTensorMode, device: str) -> Any:
    def one(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return torch.device(device) if isinstance(tensor, torch.device) else tensor
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    return tree_map(one, value)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "mtia"])
def test_every_entry_agrees_in_dtype_on_fake_tensors(device: str, low: torch.dtype) -> None:
    wrong, ran, hits = [], 0, set()
    torch.manual_seed(0)
    for attribute, name, call, args, kwargs in calls(AutocastTestLists(torch.device("cpu"))):
        mode = FakeTensorMode()
        args = fake(with_low(args, low), mode, device)
        with mode, torch.no_grad(), autocast_state(device, low):
            native = run_fake(call, args, kwargs)
            if native.error is not None:
                continue
            with served_by_mezzo(device, hits):
                served = run_fake(call, args, kwargs)
        ran += 1
        wrong += [f"{attribute}.{name}: {text}" for text in differences(native, served, values=False)]
    assert not wrong, "\n".join(wrong)
    assert ran > 100
    assert len(hits) > 60, sorted(hits)


def run_fake(call: Any, args: Any, kwargs: Any) -> Outcome:
    try:
        return Outcome(value=call(*args, **kwargs))
    except Exception as error:
        return Outcome(error=error)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(
    ("attribute", "expected"),
    [("torch_fp16", "low"), ("nn_fp16", "low"), ("torch_fp32", "fp32"), ("nn_fp32", "fp32"), ("methods_fp32", "fp32")],
)
def test_unified_gives_a_cpu_the_dtypes_of_the_accelerator_lists(
    attribute: str, expected: str, low: torch.dtype
) -> None:
    torch.manual_seed(0)
    dtype = low if expected == "low" else torch.float32
    ran = 0
    for found, name, call, args, kwargs in calls(AutocastTestLists(torch.device("cpu"))):
        if found != attribute:
            continue
        with autocast_state("cpu", low), policy_on("cpu", "unified"):
            result = outcome(call, with_low(args, low), kwargs)
        if isinstance(result.error, RuntimeError | NotImplementedError):
            continue
        assert result.error is None, (name, result.error)
        first = result.value if isinstance(result.value, torch.Tensor) else result.value[0]
        assert first.dtype == dtype, name
        ran += 1
    assert ran, attribute
