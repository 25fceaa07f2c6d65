"""PyTorch on the CPU as a backend of the conformance tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import mezzo.torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mezzo.builtin import PolicyLike

__all__ = ["TorchBackend"]


class TorchBackend:
    """`mezzo.torch` on the CPU."""

    name = "torch"
    low_dtypes = ("bfloat16", "float16")

    def region(
        self, dtype: str | None = None, *, enabled: bool = True, policy: PolicyLike | None = None
    ) -> mezzo.torch.autocast:
        low = None if dtype is None else getattr(torch, dtype)
        return mezzo.torch.autocast("cpu", dtype=low, enabled=enabled, policy=policy)

    def array(self, values: Sequence[Any], dtype: str) -> Tensor:
        return torch.tensor(values, dtype=getattr(torch, dtype))

    def numbers(self, array: Tensor) -> list[float]:
        return array.detach().double().flatten().tolist()

    def dtype_name(self, array: Tensor) -> str:
        return str(array.dtype).removeprefix("torch.")

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    def softmax(self, array: Tensor) -> Tensor:
        return array.softmax(-1)

    def sum(self, array: Tensor) -> Tensor:
        return array.sum()

    def relu(self, array: Tensor) -> Tensor:
        return array.relu()

    def cross(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.cross(left, right, dim=-1)

    def gradient(self, function: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
        leaf = weight.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf)
        return gradient

    def is_enabled(self) -> bool:
        return torch.is_autocast_enabled("cpu")
