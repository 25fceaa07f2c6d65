"""The report of what mixed precision did: records, their sums, findings, as a table of text and as data.

No framework and no terminal library: `mezzo.jax.explain` fills it in, and other adapters can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from .report_findings import Finding, Residuals
from .report_records import Cast, OpRecord, SourceLine
from .report_text import report_text, table_text
from .report_totals import DotCount, Totals

__all__ = ["Cast", "DotCount", "Finding", "OpRecord", "Region", "Report", "Residuals", "SourceLine", "Totals"]


@dataclass(frozen=True)
class Region:
    """One application of autocast.

    Attributes:
        name: What it was applied to.
        settings: How: the dtype, the policy, and the options that differ from their defaults, as text.
        records: What happened to each op, in the order of the program.
        findings: What the user may not expect.
        residuals: What is kept for the backward pass; None where that has no meaning.
        count: How often the same was seen: applied in several places, or traced several times. The totals count it once.

    Example:
        >>> Region("loss", {"dtype": "bfloat16"}).totals.ops
        0
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    records: tuple[OpRecord, ...] = ()
    findings: tuple[Finding, ...] = ()
    residuals: Residuals | None = None
    count: int = 1

    def __hash__(self) -> int:
        """Hash what is hashable of it; equal regions have equal names and records."""
        return hash((self.name, self.records))

    def __post_init__(self) -> None:
        """Keep the settings from being changed."""
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))

    @property
    def totals(self) -> Totals:
        """What its records add up to."""
        return Totals.of(self.records)

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold.

        Returns:
            ``name``, ``count``, ``settings``, ``totals``, ``residuals``, ``warnings`` and ``ops``.
        """
        return {
            "name": self.name,
            "count": self.count,
            "settings": dict(self.settings),
            "totals": self.totals.as_dict(),
            "residuals": self.residuals.as_dict() if self.residuals else None,
            "warnings": [finding.as_dict() for finding in self.findings],
            "ops": [record.as_dict() for record in self.records],
        }


@dataclass(frozen=True)
class Report:
    """What mixed precision did to a program. ``print(report)`` shows it.

    A frozen value that holds no tensors; threads may share one.

    Attributes:
        title: What was explained.
        framework: Whose program it is.
        regions: One per application of autocast.
        notes: What the report cannot see, or had to leave out.

    Example:
        >>> dot = OpRecord("dot_general", "lower_precision_fp", source=SourceLine("net.py", 3, "loss"),
        ...                came=("float32", "float32"), used=("bfloat16", "bfloat16"), gave=("bfloat16",),
        ...                shapes_in=((8, 4), (4, 2)), shapes_out=((8, 2),), dot=True)
        >>> total = OpRecord("reduce_sum", "fp32", source=SourceLine("net.py", 4, "loss"), came=("bfloat16",),
        ...                  used=("float32",), gave=("float32",), shapes_in=((8, 2),), shapes_out=((),))
        >>> report = Report("loss", "jax", (Region("loss", {"dtype": "bfloat16", "policy": "default"}, (dot, total)),))
        >>> print(report)
        loss: bfloat16, policy default
          dots       1  bfloat16 x bfloat16 -> bfloat16
          casts      3, reading 192 B and writing 144 B
          ops        2, of which 2 changed: 1 lower_precision_fp, 1 fp32
        <BLANKLINE>
               op                       rule                operands (came>used) -> results
        net.py:3 (loss)
               dot_general              lower_precision_fp  f32>bf16 f32>bf16 -> bf16
        net.py:4 (loss)
               reduce_sum               fp32                bf16>f32 -> f32
        >>> [row["op"] for row in report.where(rule="fp32").rows()]
        ['reduce_sum']
    """

    title: str
    framework: str
    regions: tuple[Region, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def records(self) -> tuple[OpRecord, ...]:
        """The records of all regions."""
        return tuple(record for region in self.regions for record in region.records)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings of all regions."""
        return tuple(finding for region in self.regions for finding in region.findings)

    @property
    def totals(self) -> Totals:
        """What the records of all regions add up to."""
        return Totals.of(self.records)

    @property
    def dots(self) -> tuple[DotCount, ...]:
        """Matrix products and convolutions of all regions by dtypes, the most frequent first."""
        return self.totals.dots

    def where(
        self,
        *,
        op: str | None = None,
        rule: str | None = None,
        reason: str | None = None,
        dtype: str | None = None,
        path: str | None = None,
        source: str | None = None,
        region: str | None = None,
        dot: bool | None = None,
        changed: bool | None = None,
    ) -> Report:
        """Keep the records that meet all of the conditions given.

        Args:
            op: The op's name.
            rule: The rule's name.
            reason: A part of the reason.
            dtype: A dtype among those that were used or given.
            path: A part of the path, joined with ``/``.
            source: A part of ``file:line``.
            region: The region's name.
            dot: Whether it is a matrix product or convolution.
            changed: Whether a dtype is another than without autocast.

        Returns:
            A report with these records, and with the findings at their source lines; a region without any is left out.

        Example:
            >>> Report("loss", "jax").where(op="exp", changed=True).records
            ()
        """
        conditions = {"op": op, "rule": rule, "dot": dot, "changed": changed}
        exact = {name: wanted for name, wanted in conditions.items() if wanted is not None}

        def fits(record: OpRecord) -> bool:
            return (
                all(getattr(record, name) == wanted for name, wanted in exact.items())
                and (dtype is None or dtype in record.used + record.gave)
                and _has(reason, record.reason)
                and _has(path, "/".join(record.path))
                and _has(source, f"{record.source.file}:{record.source.line}" if record.source else "")
            )

        chosen = [_narrowed(one, [*filter(fits, one.records)]) for one in self.regions if region in (None, one.name)]
        return replace(self, regions=tuple(one for one in chosen if one.records))

    def table(self, *, width: int = 100, rows: int | None = None) -> str:
        """Write the ops as a table: grouped by source line, or by path where no line is known, like neighbours folded.

        Args:
            width: The longest line.
            rows: How many lines at most for each region; None writes all.

        Returns:
            The text.
        """
        return table_text(self, width=width, rows=rows)

    def rows(self) -> list[dict[str, Any]]:
        """Give the records as a list of flat dictionaries, as data frames take them.

        Returns:
            One per record, as `OpRecord.as_dict`, with the region's name as ``region``.
        """
        return [{"region": region.name, **record.as_dict()} for region in self.regions for record in region.records]

    def as_dict(self) -> dict[str, Any]:
        """Give the whole report as plain data that JSON can hold.

        Returns:
            ``title``, ``framework``, ``totals``, ``notes`` and ``regions``.
        """
        return {
            "title": self.title,
            "framework": self.framework,
            "totals": self.totals.as_dict(),
            "notes": list(self.notes),
            "regions": [region.as_dict() for region in self.regions],
        }

    def __str__(self) -> str:
        return report_text(self, width=100, rows=80)


def _has(part: str | None, text: str) -> bool:
    return part is None or part in text


def _narrowed(region: Region, records: list[OpRecord]) -> Region:
    if len(records) == len(region.records):
        return region
    lines = {record.source for record in records}
    findings = tuple(finding for finding in region.findings if finding.source in lines)
    return replace(region, records=tuple(records), findings=findings)
