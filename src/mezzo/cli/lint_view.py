"""How the findings of the lint are shown where nothing else was recorded: without sums, of which there are none."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from mezzo.report import Finding, Report

__all__ = ["joined", "show_lint"]


def joined(report: Report) -> Report:
    """Give what the lint found to the region that has records, so that it has no part of its own with nothing in it.

    Args:
        report: The report, with a region of the lint's or without.

    Returns:
        The report to show; as it is if no region has records.

    Example:
        >>> joined(Report("train.py", "torch")).regions
        ()
    """
    full = [region for region in report.regions if region.records]
    if not full:
        return report
    others = [finding for region in report.regions if not region.records for finding in region.findings]
    first = replace(full[0], findings=(*full[0].findings, *others))
    return replace(report, regions=(first, *full[1:]))


def show_lint(report: Report, console: Console) -> None:
    """Print the findings and notes of a report that has no records.

    Args:
        report: The report.
        console: Where to print.

    Example:
        >>> show_lint(Report("train.py", "torch"), Console(width=60))
        train.py: the lint has found nothing
    """
    findings = report.warnings
    counted = {0: "nothing", 1: "1 thing"}.get(len(findings), f"{len(findings)} things")
    console.print(Text(f"{report.title}: the lint has found {counted}", style="bold"))
    for finding in findings:
        _show_one(finding, console)
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"))


def _show_one(finding: Finding, console: Console) -> None:
    where = " ".join(["/".join(finding.path), f"at {finding.source}" if finding.source else ""]).strip()
    console.print(Text(f"{finding.kind}: {where}" if where else finding.kind, style="yellow"))
    times = f" ({finding.count} times)" if finding.count > 1 else ""
    for text, style in ((f"{finding.message}{times}", ""), (finding.advice, "green")):
        if text:
            console.print(Padding(Text(text, style=style, overflow="fold"), (0, 0, 0, 2), expand=False))
