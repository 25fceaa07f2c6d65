"""Gradients for the tests of clipping, and PyTorch's functions on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SHAPES = [(3, 4), (7,), (), (90, 100), (2, 3, 5)]  # one of them is large enough to be divided in parts
FOREACH = [None, True, False]


class HostReads(TorchDispatchMode):
    """Counts the reads of a number by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def make(dtype: torch.dtype = torch.float32, *, factor: float = 1.0, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * factor).to(dtype) for shape in SHAPES]


def with_parameters(gradients: Sequence[Tensor]) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros_like(gradient, requires_grad=False).to_dense())
        parameter.grad = gradient.clone()
        parameters.append(parameter)
    return parameters


def torch_norm(gradients: Sequence[Tensor], *args: float, **kwargs) -> tuple[Tensor, list[Tensor]]:
    parameters = with_parameters(gradients)
    norm = nn.utils.clip_grad_norm_(parameters, *args, **kwargs)
    return norm, [parameter.grad for parameter in parameters]


def torch_value(gradients: Sequence[Tensor], *args: float, **kwargs) -> list[Tensor]:
    parameters = with_parameters(gradients)
    nn.utils.clip_grad_value_(parameters, *args, **kwargs)
    return [parameter.grad for parameter in parameters]


def equal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def same_with_nan(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0))
        for one, other in zip(ones, others, strict=True)
    )


def sparse(dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a gradient with the values 8, 4 and 0.5, of which the first is in two halves."""
    places, values = torch.tensor([[0, 2, 0, 5]]), torch.tensor([6.0, 4.0, 2.0, 0.5], dtype=dtype)
    return torch.sparse_coo_tensor(places, values, (6,), check_invariants=True)
