"""PyTorch's kernels of gradient scaling beside mezzo's, and how to tell their results apart."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.torch.scaling_kernels import non_finite_check_and_unscale_, update_scale_

PATTERNS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
UNSCALES = {"pytorch": torch._amp_foreach_non_finite_check_and_unscale_, "mezzo": non_finite_check_and_unscale_}
UPDATES = {"pytorch": torch._amp_update_scale_, "mezzo": update_scale_}


def bits(tensor: Tensor) -> list[int | str]:
    """List the bits of each number; a NaN has many spellings, which do not count."""
    patterns = tensor.detach().contiguous().reshape(-1).view(PATTERNS[tensor.dtype]).tolist()
    return [
        "nan" if number != number else pattern
        for number, pattern in zip(tensor.flatten().tolist(), patterns, strict=True)
    ]


def float32(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32)


def int32(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int32)
