"""The report of what mixed precision did: records, their sums, findings, as a table of text and as data.

No framework and no terminal library: `mezzo.torch.explain` and `mezzo.jax.explain` fill it in, and other adapters can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from .findings import Finding
from .modules import ModuleTotals, module_tree
from .ops import DtypeTotals, OpTotals, totals_by_dtype, totals_by_op
from .records import OpRecord
from .regions import Region
from .saving import save_report
from .text import report_text, table_text
from .totals import DotCount, Totals
from .where import condition

__all__ = ["Report"]

FORMAT = 1
"""The number of the layout of the data that `Report.as_dict` gives."""


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
        >>> from mezzo.report import OpRecord, Region, Report, SourceLine
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

    @property
    def modules(self) -> ModuleTotals:
        """What the records add up to in each module: a tree, of which the root holds all. Added up anew at each look."""
        return module_tree(self.records, separator="." if self.framework == "torch" else "/")

    @property
    def by_op(self) -> tuple[OpTotals, ...]:
        """What the records add up to for each op, the most frequent first. Added up anew at each look."""
        return totals_by_op(self.records)

    @property
    def by_dtype(self) -> Mapping[str, DtypeTotals]:
        """Dtype to the ops that ran in it, those with a rule and the others apart. Added up anew at each look."""
        return totals_by_dtype(self.records)

    def where(
        self,
        *,
        op: str | None = None,
        rule: str | None = None,
        reason: str | None = None,
        dtype: str | None = None,
        path: str | None = None,
        module: str | None = None,
        phase: str | None = None,
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
            module: A module's whole name; what is in it or in a module inside it meets this.
            phase: The phase, such as ``"backward"``.
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
        fits = condition(
            {"op": op, "rule": rule, "phase": phase, "dot": dot, "changed": changed}
            | {"reason": reason, "path": path, "source": source, "dtype": dtype, "module": module}
        )
        chosen = [one.narrowed([*filter(fits, one.records)]) for one in self.regions if region in (None, one.name)]
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
            ``format``, ``title``, ``framework``, ``totals``, ``notes``, ``modules``, ``by_op``, ``by_dtype`` and
            ``regions``. ``format`` is a number: later versions of mezzo may add keys to the data of a format, and take away
            or change none.
        """
        return {
            "format": FORMAT,
            "title": self.title,
            "framework": self.framework,
            "totals": self.totals.as_dict(),
            "notes": list(self.notes),
            "modules": self.modules.as_dict(),
            "by_op": [one.as_dict() for one in self.by_op],
            "by_dtype": [one.as_dict() for one in self.by_dtype.values()],
            "regions": [region.as_dict() for region in self.regions],
        }

    def save(self, path: str | PathLike[str]) -> Path:
        """Write it to a file, as the file's name ends.

        Args:
            path: The file: ``.json`` for the data of `as_dict`, ``.html`` for one page that needs no network, ``.txt`` for
                the text with the whole table. An older file of the name is replaced.

        Returns:
            The path.

        Raises:
            ValueError: The name ends otherwise. Nothing is written.
            OSError: The file cannot be written.

        In the JSON, floats that are not finite are the strings ``"Infinity"``, ``"-Infinity"`` and ``"NaN"``. Safe in
        threads and processes that write to different files.
        """
        return save_report(self, path)

    def __str__(self) -> str:
        return report_text(self, width=100, rows=80)
