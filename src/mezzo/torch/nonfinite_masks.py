"""Infinities that are meant: what a program writes to mask something out, as -Inf or as a number that stands for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mezzo.torch.nonfinite_causes import Call
from mezzo.torch.nonfinite_checks import Counted
from mezzo.torch.op_facts import is_float, tensors_of

__all__ = ["is_mask"]

_LIKE_A_MASK = -3e4
"""Numbers below it that all are one and the same stand for -Inf: -1e9, -65504, the smallest float32."""


def is_mask(call: Call, result: Tensor, gave: Counted) -> bool:
    """Say whether the infinities that an op's result has, and none of its operands, are meant.

    Args:
        call: The call.
        result: Its result.
        gave: What of it is not finite.

    Returns:
        True if Inf, -Inf or NaN is among the numbers that the call was given. True too if there is -Inf alone, and only
        where an operand has a large negative number, always the same: a mask of -1e9 that was cast to float16, or to which
        scores were added.
    """
    numbers = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, float)]
    if any(not math.isfinite(number) for number in numbers):
        return True
    if gave.nan or gave.inf:
        return False
    there = result.isneginf()
    for operand in tensors_of((*call.args, *call.kwargs.values())):
        if is_float(operand.dtype) and not operand.is_complex() and operand is not result:
            try:
                below = operand.to(torch.float32).expand(result.shape)[there]
            except RuntimeError:  # of a shape that does not go with the result's
                continue
            lowest, highest = below.aminmax()
            if float(highest) <= _LIKE_A_MASK and float(lowest) == float(highest):
                return True
    return False
