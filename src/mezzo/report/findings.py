"""What a user of mixed precision may not expect, and what is kept for the backward pass, as data and as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .records import SourceLine

__all__ = ["Finding", "Residuals", "in_bytes"]


@dataclass(frozen=True)
class Finding:
    """Something that the user may not expect.

    Attributes:
        kind: What it is, in a word or two that programs can compare.
        message: What happened, and why.
        advice: What to do about it; empty if nothing need be done.
        source: Where.
        path: Inside of what.
        count: How often, if the same was found more than once at this place.

    Example:
        >>> print(Finding("dot in float32", "dot_general ran in float32: precision=HIGHEST", count=2))
        dot_general ran in float32: precision=HIGHEST (2 times)
    """

    kind: str
    message: str
    advice: str = ""
    source: SourceLine | None = None
    path: tuple[str, ...] = ()
    count: int = 1

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        return f"{where}{self.message}" + (f" ({self.count} times)" if self.count > 1 else "")

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold.

        Returns:
            One flat dictionary.
        """
        return {
            "kind": self.kind,
            "message": self.message,
            "advice": self.advice,
            "file": self.source.file if self.source else None,
            "line": self.source.line if self.source else None,
            "path": "/".join(self.path),
            "count": self.count,
        }

    @staticmethod
    def merge(findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """Fold findings that say the same of the same place into one with their count.

        Args:
            findings: Any findings.

        Returns:
            One for each that differs, in the order of their first.

        Example:
            >>> one = Finding("unknown op", "spam is not in the table")
            >>> [finding.count for finding in Finding.merge([one, one, one])]
            [3]
        """
        counts: dict[Finding, int] = {}
        for finding in findings:
            bare = Finding(finding.kind, finding.message, finding.advice, finding.source, finding.path)
            counts[bare] = counts.get(bare, 0) + finding.count
        return tuple(
            Finding(one.kind, one.message, one.advice, one.source, one.path, count) for one, count in counts.items()
        )


@dataclass(frozen=True)
class Residuals:
    """What is kept from the forward pass for the backward pass.

    Attributes:
        plain: Bytes without autocast, None if they could not be found.
        autocast: Bytes under autocast, None if they could not be found.
        reason: Why they could not be found.

    Example:
        >>> str(Residuals(4 * 2**20, 2**20))
        '1.0 MiB, without autocast 4.0 MiB (x 0.25)'
        >>> str(Residuals(None, None, "no float array among the arguments"))
        'not known: no float array among the arguments'
    """

    plain: int | None
    autocast: int | None
    reason: str = ""

    def __str__(self) -> str:
        if self.plain is None or self.autocast is None:
            return f"not known: {self.reason}"
        ratio = f" (x {self.autocast / self.plain:.2f})" if self.plain else ""
        return f"{in_bytes(self.autocast)}, without autocast {in_bytes(self.plain)}{ratio}"

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold.

        Returns:
            The three attributes.
        """
        return {"plain": self.plain, "autocast": self.autocast, "reason": self.reason}


def in_bytes(number: int) -> str:
    """Say a number of bytes in the unit that fits.

    Example:
        >>> in_bytes(512), in_bytes(1536), in_bytes(3 * 2**30)
        ('512 B', '1.5 KiB', '3.0 GiB')
    """
    if number < 1024:
        return f"{number} B"
    power = min((number.bit_length() - 1) // 10, 4)
    return f"{number / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
