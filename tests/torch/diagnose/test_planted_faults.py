"""`find_nonfinite` names the op, the module and the line of each fault that is planted in a transformer of six layers."""

from __future__ import annotations

import copy

import pytest
import torch

from mezzo.torch import autocast, find_nonfinite

from .planted import BOTH, FAULTS, Fault
from .transformer import TOKENS, Transformer

CASES = [(fault, dtype) for fault in FAULTS for dtype in fault.dtypes]
IDS = [f"{fault.name} in {str(dtype).removeprefix('torch.')}" for fault, dtype in CASES]


def model_with(fault: Fault | None) -> Transformer:
    torch.manual_seed(0)
    model = Transformer()
    if fault is not None:
        fault.plant(model)
    return model


def run(model: Transformer, dtype: torch.dtype, scale: float = 1024.0) -> None:
    """Run a training step's two passes, as everybody does."""
    with autocast("cpu", dtype=dtype):
        loss = model(TOKENS)
    (loss * scale).backward()


@pytest.mark.parametrize(("fault", "dtype"), CASES, ids=IDS)
@pytest.mark.parametrize("named", [True, False], ids=["model given", "model not given"])
def test_a_planted_fault_is_named_by_op_and_module_and_line(fault: Fault, dtype: torch.dtype, named: bool) -> None:
    model = model_with(fault)
    with find_nonfinite(model if named else None) as found:
        run(model, dtype, fault.scale)
    first = found.first
    assert first is not None
    assert (first.op, first.path, first.phase, first.kind) == (fault.op, (fault.module,), fault.phase, fault.kind)
    assert first.dtype == (fault.dtype or str(dtype).removeprefix("torch."))
    assert first.source is not None
    assert first.source.place == fault.place


@pytest.mark.parametrize(("fault", "dtype"), CASES, ids=IDS)
def test_the_report_alone_says_what_and_where(fault: Fault, dtype: torch.dtype) -> None:
    model = model_with(fault)
    with find_nonfinite() as found:
        run(model, dtype, fault.scale)
    text = str(found)
    for word in (
        fault.op.removeprefix("aten::"),
        fault.module,
        fault.place,
        fault.kind,
        str(dtype).removeprefix("torch."),
        fault.phase,
    ):
        assert word in text


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_nothing_is_found_in_a_sound_model(dtype: torch.dtype) -> None:
    model = model_with(None)
    with find_nonfinite(model) as found:
        run(model, dtype)
    assert found.first is None
    assert found.parameters == ()


@pytest.mark.parametrize(("fault", "dtype"), CASES, ids=IDS)
def test_a_planted_fault_breaks_the_passes_in_the_dtypes_that_it_names_and_only_there(
    fault: Fault, dtype: torch.dtype
) -> None:
    """So that the tests above look for something that is there, and that is the dtype's doing where only float16 has it."""
    model = model_with(fault)
    wide = copy.deepcopy(model)
    run(model, dtype, fault.scale)
    assert not all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    run(wide, torch.bfloat16, fault.scale)
    sound = all(parameter.grad.isfinite().all() for parameter in wide.parameters() if parameter.grad is not None)
    assert sound is (torch.bfloat16 not in fault.dtypes)
