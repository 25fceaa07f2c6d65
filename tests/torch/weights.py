"""Weights, products that mezzo's kernels compute with them, and how to tell which cast a product came through.

``mv`` is served by mezzo under the policy "unified" on the CPU, since PyTorch's CPU table does not list it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import mezzo.torch

LOW = (torch.bfloat16, torch.float16)
OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
VECTOR = torch.tensor([1.0, 2.0, -1.0, 0.5])


def new_weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))


def unified(low: torch.dtype, **options: Any) -> mezzo.torch.autocast:
    return mezzo.torch.autocast("cpu", dtype=low, policy="unified", **options)


def multiply(weight: Tensor) -> Tensor:
    return torch.mv(weight, VECTOR)


def cast_behind(product: Tensor) -> Any:
    """Give the graph node of the cast that the weight in a product came through."""
    node = product.grad_fn.next_functions[0][0]
    assert node.name() == "ToCopyBackward0"
    return node


def fresh(weight: Tensor, low: torch.dtype) -> Tensor:
    """Compute what a product must be, without autocast."""
    with mezzo.torch.autocast("cpu", enabled=False), torch.no_grad():
        return torch.mv(weight.to(low), VECTOR.to(low))


def one_cast(first: Tensor, second: Tensor) -> bool:
    return cast_behind(first) is cast_behind(second)
