"""One application of autocast: how it was applied, what happened to each op, and what the user may not expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from .findings import Finding, Residuals
from .masks import with_masks_marked
from .records import OpRecord
from .totals import Totals

__all__ = ["Region"]


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
        marked: Whether it is known which Inf in the records are a mask's; if not, that is found out now.

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
    marked: bool = field(default=False, repr=False, compare=False)

    def __hash__(self) -> int:
        """Hash what is hashable of it; equal regions have equal names and records."""
        return hash((self.name, self.records))

    def __post_init__(self) -> None:
        """Keep the settings from being changed, and tell masks from faults."""
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))
        if not self.marked:
            # Once, while all records are there: of a part of them less can be said.
            object.__setattr__(self, "records", with_masks_marked(self.records))
            object.__setattr__(self, "marked", True)

    def __reduce__(self) -> tuple[type[Region], tuple[Any, ...]]:
        """Say how to copy and pickle it; read-only mappings cannot be pickled."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return Region, tuple({**values, "settings": dict(self.settings)}.values())

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

    def narrowed(self, records: Sequence[OpRecord]) -> Region:
        """Keep some of its records.

        Args:
            records: Some of its records, in their order.

        Returns:
            A region with these alone, and with the findings at their lines and paths.
        """
        if len(records) == len(self.records):
            return self
        lines = {record.source for record in records}
        left = {record.path for record in self.records} - {record.path for record in records}
        # Layers that are alike share their lines of code, so where records tell paths apart, the line alone is not enough.
        findings = tuple(one for one in self.findings if one.source in lines and (not one.path or one.path not in left))
        return replace(self, records=tuple(records), findings=findings)
