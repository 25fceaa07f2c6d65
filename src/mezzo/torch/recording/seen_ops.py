"""An op as a recorder writes it down while the program runs, and the `RecordedOp` that is made of it afterwards.

What runs beside every op is kept short: names and text are put together when somebody asks for the report.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mezzo.report.numbers import Numbers
from mezzo.report.records import OpRecord
from mezzo.torch.casting import dtype_name

from .memory_places import MemoryPlace, place_of
from .module_stack import ModuleNames
from .op_facts import is_dot
from .op_places import Place
from .origins import Origin
from .recorded import RecordedOp

__all__ = ["Operand", "SeenOp", "dtype_of", "operand", "recorded", "shape_of"]

Shape = tuple[int | str, ...]
Operand = tuple[torch.dtype, torch.dtype, bool, Shape, int, MemoryPlace, bool]
"""The dtype that came, the one that was used, whether by a kept cast, shape, producer, place, whether it is a leaf."""

_name = lru_cache(maxsize=64)(dtype_name)


def dtype_of(thing: Tensor | torch.dtype) -> str:
    """Give the name of a dtype, or of a tensor's."""
    return _name(thing if isinstance(thing, torch.dtype) else thing.dtype)


def shape_of(tensor: Tensor) -> Shape:
    """Give a tensor's shape; sizes that are symbols as their text."""
    return tuple(size if type(size) is int else str(size) for size in tensor.shape)


def operand(tensor: Tensor, used: torch.dtype | None, origin: Origin | None, *, kept: bool = False) -> Operand:
    """Describe a tensor that goes into an op.

    Args:
        tensor: The tensor, as it came.
        used: The dtype it was cast to; None for no cast.
        origin: What made it; None if that is not known.
        kept: Whether the cast was made earlier.
    """
    is_leaf = origin is None and tensor.is_leaf
    producer = -1 if origin is None else origin.place
    return tensor.dtype, used or tensor.dtype, kept, shape_of(tensor), producer, place_of(tensor), is_leaf


class SeenOp:
    """One op as it was seen; no tensors.

    Attributes:
        op: What the record calls it.
        rule: The rule.
        reason: Why.
        place: Where it belongs.
        operands: What went in.
        results: Dtype and shape of what came out.
        scalars: The Python numbers among its arguments.
        low: The region's dtype; None if autocast is off.
        policy: The name of the policy in force; empty if autocast is off.
        device: The device type.
        seen_as: The kernel that ran.
        numbers: What was measured of its result.
    """

    __slots__ = (
        "device",
        "low",
        "numbers",
        "op",
        "operands",
        "place",
        "policy",
        "reason",
        "results",
        "rule",
        "scalars",
        "seen_as",
    )

    def __init__(self, op: str, rule: str, reason: str, place: Place) -> None:
        self.op = op
        self.rule = rule
        self.reason = reason
        self.place = place
        self.operands: list[Operand] = []
        self.results: list[tuple[torch.dtype, Shape]] = []
        self.scalars: tuple[float | int | bool, ...] = ()
        self.low: torch.dtype | None = None
        self.policy = ""
        self.device = ""
        self.seen_as = op
        self.numbers: Numbers | None = None


def recorded(seen: SeenOp, index: int, names: ModuleNames, rank: int | None) -> RecordedOp:
    """Make the value of what was seen.

    Args:
        seen: The op.
        index: Its place in time.
        names: The names of modules and parameters.
        rank: This process's rank.
    """
    place, operands = seen.place, seen.operands
    parameters = tuple(names.parameter_at(one[5]) for one in operands)
    record = OpRecord(
        op=seen.op,
        rule=seen.rule,
        reason=seen.reason,
        path=names.path(place.running),
        source=place.site.source,
        came=tuple(_name(one[0]) for one in operands),
        used=tuple(_name(one[1]) for one in operands),
        gave=tuple(_name(dtype) for dtype, _ in seen.results),
        shapes_in=tuple(one[3] for one in operands),
        shapes_out=tuple(shape for _, shape in seen.results),
        dot=is_dot(seen.op),
        phase=place.phase,
        kept=tuple(number for number, one in enumerate(operands) if one[2]),
        operands=tuple(name or "" for name in parameters),
        rank=rank,
        numbers=seen.numbers,
    )
    return RecordedOp(
        record,
        index,
        tuple(one[4] for one in operands),
        parameters,
        seen.scalars,
        None if seen.low is None else _name(seen.low),
        frozenset(place.site.callers),
        seen.seen_as,
        tuple(one[6] for one in operands),
        seen.device,
    )
