"""-Inf that is meant to mask is no finding; what goes wrong because of a mask is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mezzo.torch import autocast, find_nonfinite

HALF = torch.finfo(torch.float16).min


def scores(dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)


def upper() -> Tensor:
    return torch.ones(4, 4, dtype=torch.bool).triu(1)


MASKED: dict[str, Callable[[], Tensor]] = {
    "masked_fill": lambda: scores().masked_fill(upper(), float("-inf")),
    "masked_fill_": lambda: scores().masked_fill_(upper(), -torch.inf),
    "where": lambda: torch.where(upper(), float("-inf"), scores()),
    "where with a tensor": lambda: torch.where(upper(), torch.tensor(float("-inf"), dtype=torch.float16), scores()),
    "full and triu": lambda: scores() + torch.full((4, 4), float("-inf")).triu(1),
    "a float mask": lambda: scores() + torch.zeros(4, 4).masked_fill(upper(), float("-inf")),
    "-1e9 cast to float16": lambda: scores() + (upper().float() * -1e9).half(),
    "-1e9 times a mask": lambda: scores() + upper().half() * -1e9,
    "float16's own lowest number added": lambda: scores() - 40 + upper().half() * HALF,
    "twice": lambda: (upper().half() * HALF) + (upper().half() * HALF) + scores(),
}


@pytest.mark.parametrize("mask", MASKED.values(), ids=MASKED)
def test_a_mask_is_no_finding_nor_what_comes_of_it(mask: Callable[[], Tensor]) -> None:
    with find_nonfinite() as found:
        weights = mask().softmax(-1)
        weights.to(torch.float32).sum().item()
    assert found.first is None, str(found)
    assert "taken for a mask" in found.report.notes[0]


def test_a_mask_made_before_the_block_is_no_finding() -> None:
    mask = torch.full((4, 4), float("-inf")).triu(1)
    with find_nonfinite() as found:
        nn.Transformer.generate_square_subsequent_mask(4)
        (scores() + mask).softmax(-1)
    assert found.first is None


def test_attention_with_a_mask_trains_without_a_finding() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    padding = torch.zeros(2, 4).masked_fill(torch.tensor([False, False, True, True]), float("-inf"))
    with find_nonfinite(layer) as found:
        with autocast("cpu", dtype=torch.bfloat16):
            out = layer(torch.randn(2, 4, 8), mask, padding)
        out.float().sum().backward()
    assert found.first is None, str(found)


def test_a_row_that_is_masked_out_altogether_is_the_finding() -> None:
    with find_nonfinite() as found:
        scores().masked_fill(torch.ones(4, 4, dtype=torch.bool), float("-inf")).softmax(-1)
    assert found.first is not None
    assert (found.first.op, found.first.kind) == ("aten::_softmax", "NaN")
    assert found.first.cause == "softmax of a row in which all is -Inf: everything is masked out"


def test_a_mask_does_not_hide_an_overflow_beside_it() -> None:
    with find_nonfinite() as found:
        masked = scores().masked_fill(upper(), float("-inf"))
        masked = masked * 1  # carries the mask on
        masked + torch.full((4, 4), 60000.0).half() + torch.full((4, 4), 60000.0).half()
    assert found.first is not None
    assert (found.first.op, found.first.kind, found.first.inf > 0) == ("aten::add", "Inf", True)


def test_numbers_that_differ_are_no_mask() -> None:
    with find_nonfinite() as found:
        torch.tensor([-1e5, -2e5, -3e5]).half()
    assert found.first is not None
    assert (found.first.op, found.first.kind) == ("aten::_to_copy", "-Inf")


def test_inf_that_the_program_writes_is_meant() -> None:
    with find_nonfinite() as found:
        best = torch.full((3,), float("inf"))
        torch.minimum(best, torch.ones(3)).sum()
    assert found.first is None
