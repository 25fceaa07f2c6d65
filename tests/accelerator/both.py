"""What the tests of regions share: both classes of regions, and things to run in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mezzo.torch

DEVICE = "standin"

Autocast = Callable[..., Any]
both_classes = pytest.mark.parametrize("autocast", [torch.autocast, mezzo.torch.autocast], ids=["torch", "mezzo"])
low_dtypes = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a tensor on the device."""
    return torch.full(shape, 0.5, dtype=dtype, device=DEVICE)


def product_dtype(device: str = DEVICE) -> torch.dtype:
    """Say in which dtype a product of float32 matrices comes out."""
    return torch.mm(torch.ones(2, 2, device=device), torch.ones(2, 2, device=device)).dtype
