"""Fused attention in float32: the kernels of CUDA that refuse float32, written out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["attention_for"]

_FORWARD = frozenset({"_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"})
_BACKWARD = frozenset({f"{name}_backward" for name in _FORWARD})


def attention_for(func: OpOverload, arguments: Mapping[str, Any]) -> list[Tensor] | None:
    """Compute what a fused attention gives, without its kernel.

    Args:
        func: The op.
        arguments: Its arguments by name: query, key and value of shape (batch, heads, length, size) in float32.

    Returns:
        Of the forward op its first result, of the backward op the gradients of query, key and value; None for other ops,
        and where something is dropped at random, a bias is added or heads are shared.
    """
    name = func._schema.name.partition("::")[2]
    if name not in _FORWARD | _BACKWARD or arguments.get("dropout_p") or arguments.get("attn_bias") is not None:
        return None
    query, key, value = (arguments[one] for one in ("query", "key", "value"))
    if query.shape[:-2] != key.shape[:-2]:
        return None
    scale = arguments.get("scale") or 1 / math.sqrt(query.shape[-1])
    weights = _weights(query, key, scale, causal=bool(arguments.get("is_causal")))
    if name in _FORWARD:
        return [weights @ value]
    return _gradients(arguments["grad_out"], query, key, value, weights, scale)


def _weights(query: Tensor, key: Tensor, scale: float, *, causal: bool) -> Tensor:
    scores = query @ key.transpose(-2, -1) * scale
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    return scores.softmax(-1)


def _gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor, scale: float) -> list[Tensor]:
    of_weights = grad @ value.transpose(-2, -1)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    return [of_scores @ key, of_scores.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ grad]
