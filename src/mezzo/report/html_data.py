"""A report as compact data for its HTML page: what repeats is written once, and each op is a row of numbers.

Thousands of ops have few different operands, lines and modules: a page of 20,000 ops takes 1 MB instead of 20.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from .records import itemsize

if TYPE_CHECKING:
    from .findings import Finding
    from .numbers import Numbers
    from .records import OpRecord
    from .regions import Region
    from .report import Report

__all__ = ["plain", "report_data"]

_COLUMNS = ("op", "rule", "reason", "place", "source", "phase", "call", "region", "rank", "times", "numbers")


def report_data(report: Report) -> dict[str, Any]:
    """Give what the page shows, as data that JSON can hold.

    Args:
        report: The report.

    Returns:
        ``title``, ``framework``, ``notes``, ``totals``, ``regions`` (with their findings), the tables ``strings``,
        ``places``, ``sources``, ``calls`` and ``numbers``, and ``columns``: from each name to a list with one integer for
        each op, an index into a table. -1 is none.

    Example:
        >>> from mezzo.report import OpRecord, Region, Report
        >>> exp = OpRecord("exp", "fp32", came=("bfloat16",), used=("float32",), gave=("float32",),
        ...                shapes_in=((2,),), shapes_out=((2,),), path=("net.0",))
        >>> data = report_data(Report("net", "torch", (Region("net", records=(exp, exp)),)))
        >>> data["columns"]["op"], data["strings"][:2], data["places"]
        ([0, 0], ['exp', 'fp32'], [['net.0', ['net', '0']]])
    """
    rows = _Rows(report.framework)
    for number, region in enumerate(report.regions):
        for record in region.records:
            rows.add(record, number)
    return {
        "title": report.title,
        "framework": report.framework,
        "notes": list(report.notes),
        "totals": report.totals.as_dict(),
        "regions": [_region(region, report.framework) for region in report.regions],
        **rows.as_dict(),
    }


def plain(value: Any) -> Any:
    """Write floats that JSON does not have as text: ``"NaN"``, ``"Infinity"``, ``"-Infinity"``; the rest stays.

    Args:
        value: Data as ``as_dict()`` gives it.

    Returns:
        The same data, lists for tuples.

    Example:
        >>> plain({"error": float("nan"), "shape": (2, 3)})
        {'error': 'NaN', 'shape': [2, 3]}
    """
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


class _Table:
    """Values, each once, by the order in which they came."""

    def __init__(self) -> None:
        self._at: dict[Hashable, int] = {}
        self.rows: list[Any] = []

    def index(self, key: Hashable) -> int | None:
        """Say where a value is; None if it is new, and then the caller is to add its row."""
        found = self._at.setdefault(key, len(self.rows))
        return None if found == len(self.rows) else found

    def add(self, row: Any) -> int:
        self.rows.append(row)
        return len(self.rows) - 1


class _Rows:
    """The columns of the ops, and the tables that they point into."""

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.strings, self.places, self.sources, self.calls = _Table(), _Table(), _Table(), _Table()
        self.numbers: list[list[Any]] = []
        self.columns: dict[str, list[int]] = {name: [] for name in _COLUMNS}

    def add(self, record: OpRecord, region: int) -> None:
        row = (
            self._string(record.op),
            self._string(record.rule),
            self._string(record.reason),
            self._place(record.path),
            self._source(record),
            self._string(record.phase),
            self._call(record),
            region,
            -1 if record.rank is None else record.rank,
            -1 if record.times is None else record.times,
            self._numbers(record.numbers),
        )
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)

    def _string(self, text: str) -> int:
        found = self.strings.index(text)
        return self.strings.add(text) if found is None else found

    def _place(self, path: tuple[str, ...]) -> int:
        found = self.places.index(path)
        return self.places.add(["/".join(path), _steps(path, self.framework)]) if found is None else found

    def _source(self, record: OpRecord) -> int:
        if record.source is None:
            return -1
        found = self.sources.index(record.source)
        line = record.source
        return self.sources.add([line.file, line.line, line.function, line.place]) if found is None else found

    def _call(self, record: OpRecord) -> int:
        key = (record.came, record.used, record.gave, record.shapes_in, record.shapes_out, record.kept,
               record.operands, record.traced_in, record.traced_out, record.dot, record.encloses)  # fmt: skip
        found = self.calls.index(key)
        return self.calls.add(_call(record)) if found is None else found

    def _numbers(self, numbers: Numbers | None) -> int:
        if numbers is None:
            return -1
        self.numbers.append(_numbers(numbers))
        return len(self.numbers) - 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "strings": self.strings.rows,
            "places": self.places.rows,
            "sources": self.sources.rows,
            "calls": self.calls.rows,
            "numbers": self.numbers,
            "columns": self.columns,
        }


def _steps(path: tuple[str, ...], framework: str) -> list[str]:
    """Say where in the tree of modules a path is: PyTorch's names have dots, JAX's paths have several entries."""
    if framework != "torch":
        return list(path) or ["(the program itself)"]
    parts = [[entry] if entry.startswith("(") else entry.split(".") for entry in path]
    return [step for part in parts for step in part] or ["(outside of modules)"]


def _call(record: OpRecord) -> dict[str, Any]:
    casts = record.casts
    return {
        "came": record.came,
        "used": record.used,
        "gave": record.gave,
        "in": record.shapes_in,
        "out": record.shapes_out,
        "kept": record.kept,
        "names": record.operands,
        "traced": [record.traced_in, record.traced_out],
        "dot": record.dot,
        "encloses": record.encloses,
        "casts": len(casts),
        "read": sum(cast.bytes_read for cast in casts),
        "cast": sum(cast.bytes_written for cast in casts),
        "bytes": [
            math.ceil(itemsize(dtype) * _elements(shape))
            for dtype, shape in zip(record.gave, record.shapes_out, strict=True)
        ],
    }


def _elements(shape: tuple[int | str, ...]) -> int:
    return math.prod(size for size in shape if isinstance(size, int))


def _numbers(numbers: Numbers) -> list[Any]:
    """Give elements, largest, smallest, NaN, Inf, error, shares of both low dtypes, exponents, masked."""
    shares = [
        share
        for dtype in ("float16", "bfloat16")
        for share in (_shares(numbers, dtype) if dtype in numbers.losses else (0.0, 0.0, 0.0))
    ]
    first = min(numbers.exponents, default=0)
    last = max(numbers.exponents, default=-1)
    counts = [numbers.exponents.get(exponent, 0) for exponent in range(first, last + 1)]
    head = [numbers.elements, numbers.max_abs, numbers.min_abs, numbers.nan, numbers.inf, numbers.error]
    return [*map(plain, head), *(float(f"{share:.6g}") for share in shares), first, counts, numbers.masked]


def _shares(numbers: Numbers, dtype: str) -> tuple[float, float, float]:
    loss = numbers.losses[dtype]
    return loss.overflow, loss.underflow, loss.subnormal


def _region(region: Region, framework: str) -> dict[str, Any]:
    return {
        "name": region.name,
        "count": region.count,
        "settings": dict(region.settings),
        "residuals": str(region.residuals) if region.residuals else None,
        "findings": [_finding(finding, framework) for finding in region.findings],
    }


def _finding(finding: Finding, framework: str) -> dict[str, Any]:
    place = finding.source.place if finding.source else None
    return {
        **finding.as_dict(),
        "place": place,
        "function": finding.source.function if finding.source else "",
        "steps": _steps(finding.path, framework) if finding.path else [],
    }
