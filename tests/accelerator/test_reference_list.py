"""Every row of the accelerators' reference list, on an accelerator: in which dtype it runs, what it gives, its gradient.

The stand-in accelerator computes on the CPU, so a result is right if it equals, bit for bit, that of the same call on the
CPU with the casts written out (`by_hand.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from standin_backend import calls
from torch import Tensor

import mezzo.torch
from mezzo.tables import device_table

from . import missing_kernels
from .by_hand import OnCpu, call_by_hand, calls_of, computed, dtypes_of, expected_dtype, tensors_of
from .reference_calls import BANNED, CALLS, PAIRINGS, Call, overload

DEVICE = "standin"
LOW = (torch.float16, torch.bfloat16)
REGIONS: dict[str, Callable[..., AbstractContextManager[Any]]] = {
    "torch": torch.autocast,
    "mezzo": mezzo.torch.autocast,
}
POLICIES = {op: str(rule) for op, rule in device_table("reference").items()}

# Ops of the list that this PyTorch lacks. None on 2.13.
LACKING: frozenset[str] = frozenset()

OF_SUBCLASSES = "PyTorch takes another way for a tensor subclass, as the stand-in's are, than for a plain tensor"
ROUNDS_OTHERWISE = {
    **{
        (op, dtype): OF_SUBCLASSES
        for op in ("aten::nuclear_norm", "aten::nuclear_norm.dim")
        for dtype in (torch.float32, torch.float64)
    },
    ("gradient of aten::prod", torch.float32): OF_SUBCLASSES,
    ("gradient of aten::prod.dim_int", torch.float32): OF_SUBCLASSES,
}
"""Results that are compared to two units in the last place, and not to the bit, and why."""


@pytest.fixture(scope="module", autouse=True)
def _kernels_of_accelerators() -> Iterator[None]:
    library = missing_kernels.supply()
    yield
    library._destroy()


def named(call: Call) -> str:
    return f"{call.op.removeprefix('aten::')}-{[c for c in (*CALLS, *BANNED) if c.op == call.op].index(call)}"


def pairs(pairings: Any, calls: list[Call] = CALLS) -> list[Any]:
    """Pair each call with the pairings that differ for it: a single input cannot be mixed."""
    return [
        pytest.param(call, pairing, id=f"{named(call)}-{pairing}")
        for call in calls
        for pairing in pairings
        if call.number_of_inputs > 1 or len(PAIRINGS[pairing]) == 1
    ]


def assert_same(results: Any, expected: Any, of: str) -> None:
    """Hold results on the device against those on the CPU: dtype, shape and every bit."""
    ours, theirs = tensors_of(results), tensors_of(expected)
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.device.type == DEVICE
        rtol = 2 * torch.finfo(other.dtype).eps if (of, other.dtype) in ROUNDS_OTHERWISE else 0.0
        torch.testing.assert_close(mine.detach().cpu(), other.detach(), rtol=rtol, atol=0, equal_nan=True)


def test_every_row_of_the_list_is_covered() -> None:
    covered = {call.op for call in (*CALLS, *BANNED)}
    assert covered | LACKING == set(POLICIES)
    assert {call.op for call in BANNED} == {op for op, policy in POLICIES.items() if policy == "banned"}


def test_rows_that_this_pytorch_lacks() -> None:
    def exists(op: str) -> bool:
        try:
            return callable(overload(op))
        except AttributeError:
            return False

    assert {op for op in POLICIES if not exists(op)} == LACKING


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize(("call", "pairing"), pairs(["float32", "low", "mixed", "mixed, low first", "other"]))
def test_a_listed_op_runs_in_the_dtype_of_its_policy(call: Call, pairing: str, low: torch.dtype) -> None:
    policy, args = POLICIES[call.op], call.inputs(pairing, low)
    with OnCpu() as on_cpu:
        expected = call_by_hand(policy, call.op, args, call.kwargs, low)
    wanted = computed(on_cpu.calls)
    for region in REGIONS.values():
        moved = call.inputs(pairing, low, device=DEVICE)
        with region(DEVICE, dtype=low), calls() as ran:
            result = call.overload(*moved, **call.kwargs)
        assert tensors_of(result)[0].dtype is expected_dtype(policy, args, low)
        assert dtypes_of(computed(ran)) == dtypes_of(wanted)
        assert calls_of(call.op, computed(ran)) == calls_of(call.op, wanted)
        assert_same(result, expected, call.op)


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize(("call", "pairing"), pairs(["float64", "integers"]))
def test_a_listed_op_leaves_float64_and_integers_as_they_are(call: Call, pairing: str, low: torch.dtype) -> None:
    policy, args = POLICIES[call.op], call.inputs(pairing, low)
    expected, fault = None, None
    with OnCpu() as on_cpu:
        try:
            expected = call_by_hand(policy, call.op, args, call.kwargs, low)
        except (RuntimeError, NotImplementedError) as error:
            fault = error
    for region in REGIONS.values():
        moved = call.inputs(pairing, low, device=DEVICE)
        with region(DEVICE, dtype=low):
            if fault is None:
                with calls() as ran:
                    result = call.overload(*moved, **call.kwargs)
                assert_same(result, expected, call.op)
                assert dtypes_of(computed(ran)) == dtypes_of(computed(on_cpu.calls))
            else:
                with pytest.raises(type(fault), match=re.escape(str(fault).splitlines()[0])):
                    call.overload(*moved, **call.kwargs)


def gradients(args: Any, results: Any) -> list[Tensor]:
    """Give the gradients of the arguments for fixed, uneven gradients of the results."""
    roots = [result for result in tensors_of(results) if result.requires_grad]
    weights = [torch.linspace(0.5, 1.5, root.numel(), dtype=root.dtype).reshape(root.shape) for root in roots]
    torch.autograd.backward(roots, [weight.to(root.device) for weight, root in zip(weights, roots, strict=True)])
    leaves = [leaf for leaf in tensors_of(args) if leaf.requires_grad]
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert [gradient.dtype for gradient in found] == [leaf.dtype for leaf in leaves]
    return found


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize(("call", "pairing"), pairs(["float32", "low", "mixed"]))
def test_gradients_have_the_dtype_of_their_leaf(call: Call, pairing: str, low: torch.dtype) -> None:
    leaves = call.inputs(pairing, low, leaves=True)
    expected = gradients(leaves, call_by_hand(POLICIES[call.op], call.op, leaves, call.kwargs, low))
    for region in REGIONS.values():
        leaves = call.inputs(pairing, low, device=DEVICE, leaves=True)
        with region(DEVICE, dtype=low):
            results = call.overload(*leaves, **call.kwargs)
        assert_same(gradients(leaves, results), expected, f"gradient of {call.op}")


@pytest.mark.parametrize(
    "call", [call for call in CALLS if call.op.removeprefix("aten::") in missing_kernels.KERNELS], ids=named
)
def test_the_kernels_that_the_tests_supply_have_the_right_gradients(call: Call) -> None:
    def differentiable(*args: Any) -> tuple[Tensor, ...]:
        return tuple(result for result in tensors_of(call.overload(*args)) if result.grad_fn is not None)

    args = call.inputs("float64", torch.float16, leaves=True)
    assert torch.autograd.gradcheck(differentiable, args, check_undefined_grad=False)


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize(("call", "pairing"), pairs(PAIRINGS, BANNED))
def test_a_banned_op_raises_whatever_its_inputs(call: Call, pairing: str, low: torch.dtype) -> None:
    for region in REGIONS.values():
        moved = call.inputs(pairing, low, device=DEVICE)
        with region(DEVICE, dtype=low), calls() as ran, pytest.raises(RuntimeError, match="are unsafe to autocast"):
            call.overload(*moved, **call.kwargs)
        assert ran == []
