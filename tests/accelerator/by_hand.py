"""What a listed op is to do in a region, written with explicit casts and without a word of mezzo's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .reference_calls import overload

aten = torch.ops.aten

WIDTH = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1}
"""The dtypes that may be cast, by how much they hold."""


def may_be_cast(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in WIDTH


def to(args: Any, dtype: torch.dtype) -> Any:
    """Cast the tensors among the arguments; integers and float64 stay."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if may_be_cast(tensor) else tensor, args)


def widest(args: Any) -> torch.dtype | None:
    """Find the dtype that an op which promotes runs in; None where there is nothing to cast."""
    dtypes = [leaf.dtype for leaf in tree_leaves(args) if may_be_cast(leaf)]
    return max(dtypes, key=WIDTH.__getitem__, default=None)


def call_by_hand(policy: str, op: str, args: Any, kwargs: dict[str, Any], low: torch.dtype) -> Any:
    """Call an op the way someone without autocast would write what its cast policy says.

    Args:
        policy: The row's cast policy.
        op: The row's op.
        args: Its arguments, on the CPU.
        kwargs: Its keyword arguments.
        low: The region's dtype.
    """
    function = OTHERWISE_ON_A_CPU.get(op) or overload(op)
    if policy == "lower_precision_fp":
        return function(*to(args, low), **kwargs)
    if policy == "fp32":
        return function(*to(args, torch.float32), **kwargs)
    if policy == "fp32_set_opt_dtype":
        return function(*args, **kwargs, **({"dtype": torch.float32} if may_be_cast(args[0]) else {}))
    if policy == "fp32_append_dtype":
        return norm_with_dtype(op, args, torch.float32 if may_be_cast(args[0]) else args[0].dtype)
    assert policy == "promote", policy
    dtype = widest(args)
    return function(*(args if dtype is None else to(args, dtype)), **kwargs)


def norm_with_dtype(op: str, args: Any, dtype: torch.dtype) -> Tensor:
    if op == "aten::norm.Scalar":
        return aten.norm.ScalarOpt_dtype(*args, *[2][len(args) - 1 :], dtype=dtype)  # type: ignore[no-any-return]
    return aten.norm.ScalarOpt_dim_dtype(*args, dtype=dtype)  # type: ignore[no-any-return]


def expected_dtype(policy: str, args: Any, low: torch.dtype) -> torch.dtype:
    """Name the dtype of the result of a call with inputs that may be cast."""
    if policy == "promote":
        return max((leaf.dtype for leaf in tensors_of(args) if may_be_cast(leaf)), key=WIDTH.__getitem__)
    return low if policy == "lower_precision_fp" else torch.float32


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def gru_by_gates(x: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    gates = aten._thnn_fused_gru_cell(x @ w_ih.t(), hidden @ w_hh.t(), hidden, b_ih, b_hh)
    return gates[0]  # type: ignore[no-any-return]


def lstm_by_gates(
    x: Tensor, state: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
) -> tuple[Tensor, Tensor]:
    gates = aten._thnn_fused_lstm_cell(x @ w_ih.t(), state[0] @ w_hh.t(), state[1], b_ih, b_hh)
    return gates[:2]  # type: ignore[no-any-return]


def plain_attention(*args: Tensor) -> Tensor:
    return aten._scaled_dot_product_attention_math(*args)[0]  # type: ignore[no-any-return]


OTHERWISE_ON_A_CPU: dict[str, Callable[..., Any]] = {
    "aten::gru_cell": gru_by_gates,
    "aten::lstm_cell": lstm_by_gates,
    "aten::scaled_dot_product_attention": plain_attention,
}
"""Ops that PyTorch takes apart for an accelerator in another way than for a CPU; this is that way."""


Ran = list[tuple[str, tuple[torch.dtype, ...]]]
"""What ran below autograd, where casts have been made: ops, and the dtypes of their floating inputs."""

CASTS = frozenset({"_to_copy", "copy_", "clone"})


class OnCpu(TorchDispatchMode):
    """Notes what the CPU runs, as the stand-in's own recorder does on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.calls.append((name, tuple(leaf.dtype for leaf in tensors_of((args, kwargs)))))
        return func(*args, **(kwargs or {}))


def computed(calls: Iterable[tuple[Any, ...]]) -> Ran:
    """Leave out of a record what casts and copies, and the inputs that are no floating-point tensors."""
    found = ((op, tuple(dtype for dtype in dtypes if dtype.is_floating_point)) for op, dtypes, *_ in calls)
    return [(op, dtypes) for op, dtypes in found if dtypes and op not in CASTS]


def dtypes_of(ran: Ran) -> set[torch.dtype]:
    """Name every dtype that was computed in."""
    return {dtype for _, dtypes in ran for dtype in dtypes}


def calls_of(op: str, ran: Ran) -> list[tuple[torch.dtype, ...]]:
    """Give the dtypes of the inputs of each call of one op, as the table spells it."""
    name = op.removeprefix("aten::").partition(".")[0]
    return [dtypes for called, dtypes in ran if called == name]
