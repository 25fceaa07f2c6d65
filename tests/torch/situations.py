"""Situations that autocast can be in, their states, and what runs in which dtype there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mezzo.torch import AutocastState, autocast, bind, capture

FULL = torch.float32


def softmax() -> tuple[torch.dtype, torch.dtype]:
    """Give the dtypes of a product and of its softmax, which is on no list of the CPU's."""
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    return product.dtype, product.softmax(-1).dtype


def states() -> dict[str, AutocastState]:
    """Give the state in each of several situations."""
    found = {"outside": capture()}
    with torch.autocast("cpu", dtype=torch.float16):
        found["plain"] = capture()
    with autocast("cpu", dtype=torch.float16, policy="unified", cache_enabled=False):
        found["unified"] = capture()
        with autocast("cpu", enabled=False):
            found["disabled"] = capture()
        with autocast("cpu", dtype=torch.bfloat16, policy="fp32"), torch.autocast("cpu", dtype=torch.bfloat16):
            found["nested"] = capture()
    with autocast("cpu", dtype=torch.bfloat16):
        found["default"] = capture()
    return found


STATES = states()
IN_FORCE = {
    "outside": (FULL, FULL),
    "plain": (torch.float16, torch.float16),
    "unified": (torch.float16, FULL),
    "disabled": (FULL, FULL),
    "nested": (FULL, FULL),
    "default": (torch.bfloat16, torch.bfloat16),
}


def bind_to(state: AutocastState, function: Callable[..., Any]) -> Callable[..., Any]:
    with state.restore():
        return bind(function)
