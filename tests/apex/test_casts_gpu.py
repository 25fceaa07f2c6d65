"""O1 on a real GPU: autograd runs backward passes in threads of its own, which see what the calling thread had."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo.apex.amp import casts
from mezzo.apex.amp.cast_state import nesting
from mezzo.apex.amp.registered import float_function, half_function

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
low_dtypes = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)


class Look(torch.autograd.Function):
    """Notes where its backward runs and what it computes in."""

    seen: list[tuple[bool, torch.dtype, torch.dtype, int]] = []

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        ones = torch.ones(2, 2, device=DEVICE)
        elsewhere = threading.current_thread() is not threading.main_thread()
        Look.seen.append((elsewhere, (ones @ ones).dtype, half_function(lambda x: x)(ones).dtype, nesting()))
        return grad


@low_dtypes
def test_backward_passes_see_what_the_calling_thread_had(low: torch.dtype) -> None:
    casts.start([DEVICE], low, {})
    Look.seen.clear()
    loss = Look.apply(torch.ones(1, device=DEVICE, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    with casts.without_casts():
        loss.backward(retain_graph=True)
    assert Look.seen == [(True, low, low, 0), (True, torch.float32, low, 0)]


@low_dtypes
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_what_runs_again_for_checkpointing_is_cast_by_the_lists_of_apex(low: torch.dtype, reentrant: bool) -> None:
    seen: list[torch.dtype] = []

    def part(x: Tensor) -> Tensor:
        # gelu is float32 by Apex, and not listed by PyTorch.
        output = torch.nn.functional.gelu(first(x))
        seen.append(output.dtype)
        return float_function(lambda y: y * y)(output)

    first = nn.Linear(8, 8, device=DEVICE)
    casts.start([DEVICE, "cpu"], low, {})
    x = torch.rand(4, 8, device=DEVICE, requires_grad=True)
    loss = checkpoint(part, x, use_reentrant=reentrant).sum()
    with casts.without_casts():
        loss.backward()
    assert seen == [torch.float32, torch.float32]
    assert first.weight.grad is not None
    assert torch.isfinite(first.weight.grad).all()
