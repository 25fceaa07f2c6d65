"""What the records of ops add up to: matrix products by dtype, casts and their bytes, rules, results by dtype."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .records import OpRecord, itemsize

__all__ = ["DotCount", "Totals"]


@dataclass(frozen=True)
class DotCount:
    """How many matrix products and convolutions ran in the same dtypes.

    Attributes:
        used: The dtypes of the operands.
        gave: The dtypes of the results.
        count: How many there are in the program.
        runs: How often they run in one call: more than ``count`` if some are in a loop. Those whose number of runs is not
            known count once.

    Example:
        >>> str(DotCount(("bfloat16", "bfloat16"), ("bfloat16",), 6, 72))
        'bfloat16 x bfloat16 -> bfloat16: 6, run 72 times'
    """

    used: tuple[str, ...]
    gave: tuple[str, ...]
    count: int
    runs: int

    @property
    def dtypes(self) -> str:
        """The dtypes as text."""
        return f"{' x '.join(self.used)} -> {', '.join(self.gave)}"

    def __str__(self) -> str:
        return f"{self.dtypes}: {self.count}" + (f", run {self.runs} times" if self.runs != self.count else "")

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold.

        Returns:
            The four attributes.
        """
        return {"used": list(self.used), "gave": list(self.gave), "count": self.count, "runs": self.runs}


@dataclass(frozen=True)
class Totals:
    """What some records add up to.

    Attributes:
        ops: How many records.
        changed: How many of them have an operand or result in another dtype than without autocast.
        rules: Rule to how many records it was applied to.
        dots: Matrix products and convolutions by dtypes, the most frequent first.
        casts: How many casts mezzo put in.
        bytes_read: Bytes that these casts read. A cast in a loop is counted once.
        bytes_written: Bytes that they write.
        results: Dtype to the bytes of the results in it, the most bytes first. What an op in a loop gives is counted once,
            and what an op only hands on from others that have records is not counted.
        phases: Phase to how many records are of it, in the order of their first.

    Example:
        >>> one = OpRecord("exp", "fp32", came=("bfloat16",), used=("float32",), gave=("float32",),
        ...                shapes_in=((10,),), shapes_out=((10,),))
        >>> totals = Totals.of([one, one])
        >>> totals.ops, totals.casts, totals.bytes_read, totals.bytes_written
        (2, 2, 40, 80)
        >>> dict(totals.results), totals.low_share
        ({'float32': 80}, 0.0)
        >>> (totals + Totals.of([one])).casts
        3
    """

    ops: int
    changed: int
    rules: Mapping[str, int]
    dots: tuple[DotCount, ...]
    casts: int
    bytes_read: int
    bytes_written: int
    results: Mapping[str, int]
    phases: Mapping[str, int]

    @classmethod
    def of(cls, records: Iterable[OpRecord]) -> Totals:
        """Add records up.

        Args:
            records: Any records.

        Returns:
            Their totals.
        """
        records = tuple(records)
        casts = [cast for record in records for cast in record.casts]
        return cls(
            ops=len(records),
            changed=sum(record.changed for record in records),
            rules=MappingProxyType(dict(Counter(record.rule for record in records).most_common())),
            dots=_dots(records),
            casts=len(casts),
            bytes_read=sum(cast.bytes_read for cast in casts),
            bytes_written=sum(cast.bytes_written for cast in casts),
            results=_results(records),
            phases=MappingProxyType(dict(Counter(record.phase for record in records))),
        )

    @property
    def bytes_given(self) -> int:
        """Bytes of all results."""
        return sum(self.results.values())

    @property
    def low_share(self) -> float | None:
        """The share of results with 16 bits or less among those that are floating-point numbers, by elements.

        Returns:
            From 0 to 1; None if there are none. Complex numbers are left out.
        """
        floats = {dtype: size for dtype, size in self.results.items() if dtype.startswith(("float", "bfloat"))}
        elements = {dtype: size / itemsize(dtype) for dtype, size in floats.items() if itemsize(dtype)}
        low = sum(number for dtype, number in elements.items() if itemsize(dtype) <= 2)
        return low / sum(elements.values()) if any(elements.values()) else None

    def __add__(self, other: Totals) -> Totals:
        """Give the totals of the records of both."""
        dots = Counter({(dot.used, dot.gave): dot.count for dot in self.dots})
        runs = Counter({(dot.used, dot.gave): dot.runs for dot in self.dots})
        dots.update({(dot.used, dot.gave): dot.count for dot in other.dots})
        runs.update({(dot.used, dot.gave): dot.runs for dot in other.dots})
        return Totals(
            ops=self.ops + other.ops,
            changed=self.changed + other.changed,
            rules=_most_first(Counter(self.rules), other.rules),
            dots=tuple(DotCount(*dtypes, count, runs[dtypes]) for dtypes, count in dots.most_common()),
            casts=self.casts + other.casts,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
            results=_most_first(Counter(self.results), other.results),
            phases=MappingProxyType(
                {**self.phases, **{phase: self.phases.get(phase, 0) + count for phase, count in other.phases.items()}}
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """Give them as plain data that JSON can hold.

        Returns:
            The attributes, ``dots`` as a list of dictionaries.
        """
        return {
            "ops": self.ops,
            "changed": self.changed,
            "rules": dict(self.rules),
            "dots": [dot.as_dict() for dot in self.dots],
            "casts": self.casts,
            "cast_bytes_read": self.bytes_read,
            "cast_bytes_written": self.bytes_written,
            "results": dict(self.results),
            "phases": dict(self.phases),
        }


def _most_first(counts: Counter[str], more: Mapping[str, int]) -> Mapping[str, int]:
    counts.update(more)
    return MappingProxyType(dict(counts.most_common()))


def _results(records: Iterable[OpRecord]) -> Mapping[str, int]:
    sizes: Counter[str] = Counter()
    for record in records:
        if not record.encloses:
            for dtype, shape in zip(record.gave, record.shapes_out, strict=True):
                elements = math.prod(size for size in shape if isinstance(size, int))
                sizes[dtype] += math.ceil(itemsize(dtype) * elements)
    return MappingProxyType(dict(sizes.most_common()))


def _dots(records: Iterable[OpRecord]) -> tuple[DotCount, ...]:
    counts: Counter[tuple[tuple[str, ...], tuple[str, ...]]] = Counter()
    runs: Counter[tuple[tuple[str, ...], tuple[str, ...]]] = Counter()
    for record in records:
        if record.dot:
            dtypes = (record.used, record.gave)
            counts[dtypes] += 1
            runs[dtypes] += 1 if record.times is None else record.times
    return tuple(DotCount(*dtypes, count, runs[dtypes]) for dtypes, count in counts.most_common())
