"""What the records add up to for each op, and which ops ran in which dtype. No framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mezzo.decision import CastPolicy

from .modules import numbers_by_phase
from .numbers import Numbers
from .records import OpRecord
from .totals import Totals

__all__ = ["DtypeTotals", "OpTotals", "ran_in", "totals_by_dtype", "totals_by_op"]

_FLOATS = ("float", "bfloat", "complex")
_LISTED = {str(policy) for policy in CastPolicy}


@dataclass(frozen=True)
class OpTotals:
    """What the calls of one op add up to.

    Attributes:
        op: The op's name.
        totals: Their totals; ``totals.ops`` is how many there are.
        dtypes: The dtype they ran in, as `ran_in` says it, to how many did.
        modules: In how many modules they are.
        numbers: Phase to how large their results are; empty if that was not asked for.

    Example:
        >>> dot = OpRecord("aten::mm", "lower_precision_fp", path=("head",), came=("float32",), used=("bfloat16",),
        ...                gave=("bfloat16",), shapes_in=((2, 2),), shapes_out=((2, 2),))
        >>> (one,) = totals_by_op([dot, dot])
        >>> one.op, one.totals.ops, one.totals.casts, dict(one.dtypes), one.modules
        ('aten::mm', 2, 2, {'bfloat16': 2}, 1)
    """

    op: str
    totals: Totals
    dtypes: Mapping[str, int]
    modules: int
    numbers: Mapping[str, Numbers] = field(default_factory=lambda: MappingProxyType({}))

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold.

        Returns:
            The attributes.
        """
        return {
            "op": self.op,
            "totals": self.totals.as_dict(),
            "dtypes": dict(self.dtypes),
            "modules": self.modules,
            "numbers": {phase: numbers.as_dict() for phase, numbers in self.numbers.items()},
        }


@dataclass(frozen=True)
class DtypeTotals:
    """Which ops ran in one dtype.

    Attributes:
        dtype: The dtype, or the dtypes joined with ``+`` of ops whose operands differed.
        listed: Ops that the policy has a rule for, to how often each ran in it, the most frequent first.
        others: The same of ops without a rule, of the backward pass, and of casts that the program asks for.
        bytes_given: Bytes of the results of all these.

    Example:
        >>> half = OpRecord("add", "promote", used=("float16",), came=("float16",), shapes_in=((),))
        >>> one = totals_by_dtype([half])["float16"]
        >>> dict(one.listed), dict(one.others)
        ({'add': 1}, {})
    """

    dtype: str
    listed: Mapping[str, int]
    others: Mapping[str, int]
    bytes_given: int

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold.

        Returns:
            The attributes.
        """
        return {
            "dtype": self.dtype,
            "listed": dict(self.listed),
            "others": dict(self.others),
            "bytes_given": self.bytes_given,
        }


def ran_in(record: OpRecord) -> str:
    """Say in which dtype an op ran: that of its floating-point or complex operands, else of its results.

    Args:
        record: The record.

    Returns:
        The dtype; several joined with ``" + "`` if its operands differ; ``""`` if no such number goes in or out.

    Example:
        >>> ran_in(OpRecord("mul", "not listed", came=("float32", "bfloat16"), used=("float32", "bfloat16"),
        ...                 shapes_in=((), ())))
        'bfloat16 + float32'
    """
    operands = {dtype for dtype in record.used if dtype.startswith(_FLOATS)}
    return " + ".join(sorted(operands or {dtype for dtype in record.gave if dtype.startswith(_FLOATS)}))


def totals_by_op(records: Iterable[OpRecord]) -> tuple[OpTotals, ...]:
    """Add records up by op.

    Args:
        records: Any records.

    Returns:
        One for each op, the most frequent first.
    """
    found: dict[str, list[OpRecord]] = {}
    for record in records:
        found.setdefault(record.op, []).append(record)
    ops = [
        OpTotals(
            op, Totals.of(same), _counts(map(ran_in, same)), len({one.path for one in same}), numbers_by_phase(same)
        )
        for op, same in found.items()
    ]
    return tuple(sorted(ops, key=lambda one: -one.totals.ops))


def totals_by_dtype(records: Iterable[OpRecord]) -> Mapping[str, DtypeTotals]:
    """List the ops by the dtype that they ran in.

    Args:
        records: Any records. Ops without floating-point or complex numbers, and calls whose inside has records of its own,
            are left out.

    Returns:
        Dtype to its ops, the dtype with the most ops first.
    """
    found: dict[str, list[OpRecord]] = {}
    for record in records:
        dtype = "" if record.encloses else ran_in(record)
        if dtype:
            found.setdefault(dtype, []).append(record)
    most = sorted(found.items(), key=lambda pair: -len(pair[1]))
    return MappingProxyType({dtype: _dtype_totals(dtype, same) for dtype, same in most})


def _dtype_totals(dtype: str, records: list[OpRecord]) -> DtypeTotals:
    return DtypeTotals(
        dtype,
        _counts(record.op for record in records if record.rule in _LISTED),
        _counts(record.op for record in records if record.rule not in _LISTED),
        sum(record.bytes_written for record in records),
    )


def _counts(names: Iterable[str]) -> Mapping[str, int]:
    return MappingProxyType({name: count for name, count in Counter(names).most_common() if name})
