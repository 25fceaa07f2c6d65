"""Infinities that are meant: what a program writes to mask something out, as -Inf or as a number that stands for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mezzo.torch.recording.numerics import is_plain
from mezzo.torch.recording.op_facts import tensors_of

from .causes import Call
from .checks import Counted

__all__ = ["is_mask"]

_FILLING = """
    full full_like new_full fill fill_ masked_fill masked_fill_ index_fill index_fill_ where where_ constant_pad_nd
    scalar_tensor index_put index_put_ scatter scatter_
"""
_FILLS = frozenset(_FILLING.split())
_COMPUTES = frozenset({"add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_"})
_CARRIES = frozenset({"add", "add_", "sub", "sub_", "_to_copy", "copy_", "masked_fill", "where", "lift_fresh"})
_LOWEST = tuple(torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32))


def _stands_for_minus_inf(number: float) -> bool:
    """Say whether a number is one that masks are made of: -1e4, -1e9 and the like, or the lowest of a dtype."""
    if number > -9e3:
        return False
    # As a lower precision rounds it.
    power = -(10.0 ** round(math.log10(-number)))
    return any(math.isclose(number, one, rel_tol=2**-7) for one in (power, *_LOWEST))


def is_mask(call: Call, result: Tensor, gave: Counted) -> bool:
    """Say whether what is not finite in an op's result, and in none of its operands, is meant.

    Args:
        call: The call.
        result: Its result.
        gave: What of it is not finite.

    Returns:
        True if the call fills in a number that is not finite, or computes with one and no NaN comes of it. True too if there
        is -Inf alone, and only where an operand, or the number given, is one that stands for it: a mask of -1e9 that was
        cast to float16, or to which scores were added.
    """
    name = call.facts.name.partition("::")[2]
    numbers = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, float)]
    meant = [number for number in numbers if not math.isfinite(number)]
    if name in _FILLS and meant:
        return not gave.nan or any(math.isnan(number) for number in meant)
    if gave.nan:
        return False
    if name in _COMPUTES and meant:
        return True
    if gave.inf or not is_plain(result):
        return False
    if name in _FILLS | _COMPUTES and any(map(_stands_for_minus_inf, numbers)):
        return True
    return name in _CARRIES and any(_masks(operand, result) for operand in tensors_of(call.args))


def _masks(operand: Tensor, result: Tensor) -> bool:
    """Say whether an operand has a number that stands for -Inf wherever the result is -Inf."""
    if operand is result or not operand.is_floating_point() or not is_plain(operand):
        return False
    try:
        below = operand.to(torch.float32).expand(result.shape)[result.isneginf()]
    except RuntimeError:  # of a shape that does not go with the result's
        return False
    lowest, highest = (float(bound) for bound in below.aminmax())
    return lowest == highest and _stands_for_minus_inf(highest)
