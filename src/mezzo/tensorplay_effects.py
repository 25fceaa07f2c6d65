"""What a policy with repairs does to a call of TensorPlay's that would fail over dtypes, in words."""

from __future__ import annotations

from . import tables
from .decision import LOW_DTYPES

__all__ = ["tensorplay_repair"]

_AGAIN = "a call that fails over dtypes is made again with its"
_REPAIRS = {
    "promote": f"{_AGAIN} inputs in the widest of their dtypes, float64 included, else in float32",
    "promote first": "inputs of several float dtypes are cast to the widest, or the result or gradient would be wrong",
    "destination": "what is written into a tensor is cast to its dtype",
}


def tensorplay_repair(op: str) -> str:
    """Say how calls of an op are mended.

    Args:
        op: A canonical op name.

    Returns:
        One sentence without a stop; empty for an op that needs no mending.

    Example:
        >>> tensorplay_repair("index_put_")
        'what is written into a tensor is cast to its dtype'
    """
    said = [_REPAIRS[kind]] if (kind := tables.repair_kinds("tensorplay").get(op)) else []
    if lacks := [low for low in LOW_DTYPES if low in tables.lacking("tensorplay").get(op, ())]:
        said.append(f"it has no right kernel for {' and '.join(lacks)}, and runs in float32 instead")
    return "; ".join(said)
