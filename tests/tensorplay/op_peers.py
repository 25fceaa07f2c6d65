"""The same calls made with PyTorch, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.tensorplay.op_samples import Call, floats

__all__ = ["PEERS", "peer_of", "run_peer", "torch_dtype"]

PEERS = {
    "tp_l1_loss": "l1_loss",
    "tp_kl_div": "kl_div",
    "tp_hinge_embedding_loss": "hinge_embedding_loss",
    "tp_margin_ranking_loss": "margin_ranking_loss",
    "tp_soft_margin_loss": "soft_margin_loss",
    "tp_cosine_embedding_loss": "cosine_embedding_loss",
    "nll_loss2d": "nll_loss2d",
}
"""Ops that PyTorch has under another name."""

ONLY_HERE = frozenset(
    {"lstm_cell", "batch_norm", "instance_norm", "poisson_nll_loss", "tp_poisson_nll_loss", "stft", "native_layer_norm"}
)
"""Ops whose arguments are not those of PyTorch's op of the same name."""


def peer_of(op: str) -> Any:
    """Find PyTorch's op for one of TensorPlay's.

    Args:
        op: TensorPlay's canonical name.

    Returns:
        The overload packet; None if PyTorch has none with the same arguments.
    """
    return None if op in ONLY_HERE else getattr(torch.ops.aten, PEERS.get(op, op), None)


def torch_dtype(dtype: Any) -> torch.dtype:
    """Give PyTorch's dtype of the same name.

    Args:
        dtype: A dtype of TensorPlay.

    Returns:
        The dtype.
    """
    found: torch.dtype = getattr(torch, str(dtype).split(".")[-1])
    return found


def run_peer(call: Call, dtypes: Sequence[Any]) -> list[torch.Tensor]:
    """Make a call with PyTorch.

    Args:
        call: The call.
        dtypes: TensorPlay's dtype of each of its float tensors; the last one serves the rest.

    Returns:
        The floating and complex tensors of the result.
    """
    count = len(floats([call.args, call.kwargs]))
    left = iter([torch_dtype(dtypes[min(place, len(dtypes) - 1)]) for place in range(count)])

    def tensors(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            made = torch.from_numpy(np.array(value))
            return made.to(next(left)) if value.dtype == np.float32 else made
        if isinstance(value, dict):
            return {name: tensors(item) for name, item in value.items()}
        return [tensors(item) for item in value] if isinstance(value, list | tuple) else value

    args = tensors(list(call.args))
    return float_results(peer_of(call.op)(*args, **tensors(call.kwargs)))


def float_results(result: Any) -> list[torch.Tensor]:
    """List the floating and complex tensors of a result of PyTorch's.

    Args:
        result: What an op gave.

    Returns:
        The tensors, in order.
    """
    if isinstance(result, torch.Tensor):
        return [result] if result.is_floating_point() or result.is_complex() else []
    return [leaf for part in result for leaf in float_results(part)] if isinstance(result, list | tuple) else []
