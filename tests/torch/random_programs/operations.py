"""The ops of the small language: how each is called, and what the documented semantics have to know about it.

Every value of a program is a 4 by 4 matrix, so that any op can follow on any other. The rest of an expression are views and
clones, which no policy casts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["OPERATIONS", "WEIGHTS", "Operation", "new_registers", "new_weights"]

INDEX = torch.tensor([2, 0, 3, 1])
INDICES = torch.tensor([[1, 0, 2, 3], [0, 0, 1, 2], [3, 1, 2, 0], [2, 3, 0, 1]])


@dataclass(frozen=True)
class Operation:
    """An op.

    Attributes:
        name: What programs call it.
        canonical: The name by which a policy rules it.
        slots: For each argument which names may stand there: ``"matrix"`` (a register or a square weight), ``"register"``
            (one that may be written into), or the name of a weight, with ``"?"`` if it may be left out.
        call: Calls it; all keywords are handed on to the op.
        writes: Whether the first argument is written into.
        takes_dtype: Whether it has an optional ``dtype``.
        prepare: What its arguments are made into first: views of them.
        finish: What makes a matrix of its result.
    """

    name: str
    canonical: str
    slots: tuple[str, ...]
    call: Callable[..., Any]
    writes: bool = False
    takes_dtype: bool = False
    prepare: Callable[[Tensor], Tensor] = lambda tensor: tensor
    finish: Callable[[Tensor], Tensor] = lambda tensor: tensor


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x, (4,), weight, bias)


def _mm_out(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out=out)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.expand(4, 4).clone()


def _batch(tensor: Tensor) -> Tensor:
    return tensor[None] if tensor.dim() == 2 else tensor


_ONE = ("matrix",)
_TWO = ("matrix", "matrix")
_INTO = ("register", "matrix")

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("linear", "aten::linear", ("matrix", "W", "B?"), F.linear),
        Operation("matmul", "aten::matmul", _TWO, torch.matmul),
        Operation("mm", "aten::mm", _TWO, torch.mm),
        Operation("bmm", "aten::bmm", _TWO, torch.bmm, prepare=_batch, finish=lambda result: result[0]),
        Operation("mv", "aten::mv", ("matrix", "B"), torch.mv, finish=_widen),
        Operation(
            "conv1d",
            "aten::conv1d",
            ("matrix", "K"),
            lambda x, weight: F.conv1d(x, weight, padding=1),
            prepare=_batch,
            finish=lambda result: result[0],
        ),
        Operation("softmax", "aten::softmax.int", _ONE, lambda x, **kw: torch.softmax(x, -1, **kw), takes_dtype=True),
        Operation(
            "sum",
            "aten::sum.dim_IntList",
            _ONE,
            lambda x, **kw: torch.sum(x, -1, keepdim=True, **kw),
            takes_dtype=True,
            finish=_widen,
        ),
        Operation("layer_norm", "aten::layer_norm", ("matrix", "N?", "B?"), _layer_norm),
        Operation("exp", "aten::exp", _ONE, torch.exp),
        Operation("bessel", "aten::special_bessel_j0", _ONE, torch.special.bessel_j0),
        Operation("add", "aten::add.Tensor", _TWO, torch.add),
        Operation("cat", "aten::cat", _TWO, lambda a, b: torch.cat([a, b]), finish=lambda result: result[2:6]),
        Operation("mse_loss", "aten::mse_loss", _TWO, lambda a, b: torch.ops.aten.mse_loss(a, b, 0)),
        Operation("index_add", "aten::index_add", _TWO, lambda a, b: torch.index_add(a, 0, INDEX, b)),
        Operation("scatter_add", "aten::scatter_add", _TWO, lambda a, b: torch.scatter_add(a, 1, INDICES, b)),
        Operation("add_", "aten::add_.Tensor", _INTO, Tensor.add_, writes=True),
        Operation("copy_", "aten::copy_", _INTO, Tensor.copy_, writes=True),
        Operation("index_add_", "aten::index_add_", _INTO, lambda a, b: a.index_add_(0, INDEX, b), writes=True),
        Operation("scatter_add_", "aten::scatter_add_", _INTO, lambda a, b: a.scatter_add_(1, INDICES, b), writes=True),
        Operation("addmm_", "aten::addmm_", ("register", "matrix", "matrix"), Tensor.addmm_, writes=True),
        Operation("mm_out", "aten::mm.out", ("register", "matrix", "matrix"), _mm_out, writes=True),
    )
}

WEIGHTS = {"W": (4, 4), "U": (4, 4), "B": (4,), "K": (4, 4, 3), "N": (4,)}
"""Names and shapes of the weights; ``U`` is frozen. ``W`` and ``U`` may stand where a matrix may."""

_REGISTERS = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float16, "d": torch.float64, "i": torch.int64}


def new_weights() -> dict[str, torch.nn.Parameter]:
    """Make the weights that every program starts with."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.rand(shape, generator=generator) - 0.5, requires_grad=name != "U")
        for name, shape in WEIGHTS.items()
    }


def new_registers() -> dict[str, Tensor]:
    """Make the values that every program starts with; their dtypes are in the order of their names."""
    generator = torch.Generator().manual_seed(1)
    values = {name: 4 * torch.rand(4, 4, generator=generator) - 2 for name in _REGISTERS}
    return {name: values[name].to(dtype) for name, dtype in _REGISTERS.items()}
