"""The single calls whose cost is measured: small tensors, so that dispatch is what one sees."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Call = Callable[[], Tensor]

LOW = torch.bfloat16

# Ops that PyTorch lists: one call, served by either side.


def _op_mm() -> Call:
    left, right = torch.randn(8, 8), torch.randn(8, 8)
    return lambda: torch.mm(left, right)


def _op_bmm() -> Call:
    left, right = torch.randn(2, 8, 8), torch.randn(2, 8, 8)
    return lambda: torch.bmm(left, right)


def _op_matmul() -> Call:
    left, right = torch.randn(8, 8), torch.randn(8, 8)
    return lambda: torch.matmul(left, right)


def _op_addmm() -> Call:
    bias, left, right = torch.randn(8), torch.randn(8, 8), torch.randn(8, 8)
    return lambda: torch.addmm(bias, left, right)


def _op_linear() -> Call:
    inputs, weight, bias = (
        torch.randn(8, 64),
        nn.Parameter(torch.randn(64, 64)),
        nn.Parameter(torch.randn(64)),
    )
    return lambda: F.linear(inputs, weight, bias)


def _op_conv2d() -> Call:
    inputs, weight = torch.randn(1, 3, 8, 8), nn.Parameter(torch.randn(4, 3, 3, 3))
    return lambda: F.conv2d(inputs, weight)


def _op_attention() -> Call:
    query, key, value = (torch.randn(1, 2, 8, 16) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(query, key, value)


def _op_mse_loss() -> Call:
    inputs, target = torch.randn(8, 8, dtype=LOW), torch.randn(8, 8, dtype=LOW)
    return lambda: F.mse_loss(inputs, target)


def _op_cat() -> Call:
    pieces = [torch.randn(8, 8, dtype=LOW), torch.randn(8, 8)]
    return lambda: torch.cat(pieces)


OPS: dict[str, Callable[[], Call]] = {
    "mm": _op_mm,
    "bmm": _op_bmm,
    "matmul": _op_matmul,
    "addmm": _op_addmm,
    "linear": _op_linear,
    "conv2d": _op_conv2d,
    "scaled_dot_product_attention": _op_attention,
    "mse_loss": _op_mse_loss,
    "cat": _op_cat,
}

# Ops whose rule "unified" changes: by the rule, and with the same dtypes written by hand.


def _rule_softmax() -> tuple[Call, Call]:
    inputs = torch.randn(8, 64, dtype=LOW)
    return lambda: torch.softmax(inputs, -1), lambda: torch.softmax(inputs, -1, dtype=torch.float32)


def _rule_layer_norm() -> tuple[Call, Call]:
    inputs, weight, bias = torch.randn(8, 64, dtype=LOW), torch.randn(64), torch.randn(64)
    return (
        lambda: F.layer_norm(inputs, (64,), weight, bias),
        lambda: F.layer_norm(inputs.float(), (64,), weight, bias),
    )


def _rule_sum() -> tuple[Call, Call]:
    inputs = torch.randn(8, 64, dtype=LOW)
    return lambda: torch.sum(inputs), lambda: torch.sum(inputs, dtype=torch.float32)


def _rule_exp() -> tuple[Call, Call]:
    inputs = torch.randn(8, 64, dtype=LOW)
    return lambda: torch.exp(inputs), lambda: torch.exp(inputs.float())


def _rule_mv() -> tuple[Call, Call]:
    matrix, vector = torch.randn(8, 8), torch.randn(8)
    return lambda: torch.mv(matrix, vector), lambda: torch.mv(matrix.bfloat16(), vector.bfloat16())


def _lifted(build: Callable[[], Call]) -> Callable[[], tuple[Call, Call]]:
    """Give an op of the low list that a policy lifts to float32: by hand that is the call outside any region."""

    def both() -> tuple[Call, Call]:
        call = build()
        return call, call

    return both


RULES: dict[str, Callable[[], tuple[Call, Call]]] = {
    "mv": _rule_mv,
    "mm": _lifted(_op_mm),
    "linear": _lifted(_op_linear),
    "conv2d": _lifted(_op_conv2d),
    "softmax": _rule_softmax,
    "layer_norm": _rule_layer_norm,
    "sum": _rule_sum,
    "exp": _rule_exp,
}
