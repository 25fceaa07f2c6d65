"""Lines that the texts of a report are made of: facts, findings, an op with its dtypes, numbers. No framework."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .findings import Finding, in_bytes
from .numbers import Numbers
from .records import OpRecord
from .totals import Totals

if TYPE_CHECKING:
    from .regions import Region

__all__ = [
    "cast_fact",
    "cut",
    "dot_facts",
    "dtypes_text",
    "fact",
    "finding_lines",
    "heading",
    "limited",
    "losses_text",
    "numbers_text",
    "op_line",
    "percent",
    "short",
    "wrap",
]

_SHORT = {"bfloat16": "bf16", "bool": "bool"}
_KINDS = {"float": "f", "uint": "u", "int": "i", "complex": "c"}


def wrap(text: str, width: int, indent: str) -> str:
    """Break a text into lines; a word that is longer stays whole.

    Args:
        text: The text.
        width: The longest line.
        indent: What the second line and those after it begin with.
    """
    return "\n".join(
        textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    )


def cut(line: str, width: int) -> str:
    """Cut what is too long of a line, and show that with dots.

    Example:
        >>> cut("a long line", 8)
        'a lon...'
    """
    return line if len(line) <= width else f"{line[: width - 3].rstrip()}..."


def limited(lines: list[str], rows: int | None, legend: str) -> list[str]:
    """Keep the first lines of a table.

    Args:
        lines: The lines.
        rows: How many at most; None keeps all.
        legend: What stands above them, if there are any.
    """
    head = [legend] if lines else []
    if rows is None or len(lines) <= rows:
        return head + lines
    left = len(lines) - rows
    return [*head, *lines[:rows], f"... and {left} more lines: print(report.table()) shows all"]


def heading(region: Region, width: int) -> str:
    """Name a region and its settings."""
    settings = ", ".join(value if name == "dtype" else f"{name} {value}" for name, value in region.settings.items())
    name = f"{region.name} ({region.count} times)" if region.count > 1 else region.name
    return wrap(f"{name}: {settings}" if settings else name, width, "  ")


def fact(name: str, text: str, width: int) -> str:
    """Write one line of a summary."""
    return wrap(f"  {name:<10} {text}", width, " " * 13)


def dot_facts(totals: Totals, width: int) -> list[str]:
    """Say how many matrix products there are, a line for each choice of dtypes."""
    lines: list[str] = []
    for dot in totals.dots:
        runs = f", run {dot.runs} times" if dot.runs != dot.count else ""
        lines.append(fact("" if lines else "dots", f"{dot.count}  {dot.dtypes}{runs}", width))
    return lines or [fact("dots", "none", width)]


def cast_fact(totals: Totals, width: int) -> str:
    """Say how many casts there are and what they move."""
    moved = f", reading {in_bytes(totals.bytes_read)} and writing {in_bytes(totals.bytes_written)}"
    return fact("casts", f"{totals.casts}{moved}" if totals.casts else "none", width)


def finding_lines(
    findings: tuple[Finding, ...], width: int, *, paths: bool = False, most: int | None = None
) -> list[str]:
    """Write findings with their advice under a heading.

    Args:
        findings: The findings.
        width: The longest line.
        paths: Whether to write the path of each, unless its message says it.
        most: How many to write; None writes all.

    Returns:
        The lines and an empty one; none if there are no findings.
    """
    lines = []
    for finding in findings[:most]:
        path = " / ".join(finding.path)
        where = f"{path}: " if paths and path not in finding.message else ""
        lines.append(wrap(f"  ! {where}{finding}", width, "    "))
        if finding.advice:
            lines += [wrap(f"    > {line}", width, "      ") for line in finding.advice.splitlines()]
    left = len(findings) - len(findings[:most])
    more = [f"  ... and {left} more: see report.warnings, or save the report"] if left else []
    return [f"warnings ({len(findings)})", *lines, *more, ""] if findings else []


def op_line(record: OpRecord, count: int, name: str, *, phase: bool = True, reason: str | None = None) -> str:
    """Write one line for ops that are alike.

    Args:
        record: One of them.
        count: How many there are.
        name: What to call it.
        phase: Whether to say the phase if it is not forward.
        reason: The reason to give; None gives the record's.
    """
    number = f"{count} x" if count > 1 else ""
    shown = f"  [{record.phase}]" if phase and record.phase != "forward" else ""
    why = record.reason if reason is None else reason
    because = f"  ({why})" if why else ""
    return f"{number:>6} {name:<24} {record.rule:<19} {dtypes_text(record)}{shown}{because}".rstrip()


def dtypes_text(record: OpRecord) -> str:
    """Write the dtypes of an op: ``>`` is a cast, ``~`` a cast that was made before; parameters have their names.

    Example:
        >>> dtypes_text(OpRecord("linear", "lower_precision_fp", came=("bfloat16", "float32", "float32"),
        ...                      used=("bfloat16",) * 3, gave=("bfloat16",), shapes_in=((), (), ()), shapes_out=((),),
        ...                      kept=(2,), operands=("", "head.weight", "head.bias")))
        'bf16 weight:f32>bf16 bias:f32~bf16 -> bf16'
    """
    names = record.operands or ("",) * len(record.came)
    operands = [
        short(came)
        if came == used
        else f"{_label(name)}{short(came)}{'~' if place in record.kept else '>'}{short(used)}"
        for place, (name, came, used) in enumerate(zip(names, record.came, record.used, strict=True))
    ]
    return f"{_runs(operands)} -> {_runs([short(dtype) for dtype in record.gave])}".strip()


def _label(name: str) -> str:
    return f"{name.rpartition('.')[2]}:" if name else ""


def _runs(names: Iterable[str]) -> str:
    """Join names, a run of more than two alike as one with its number."""
    parts = []
    for name, same in itertools.groupby(names):
        count = len([*same])
        parts += [f"{count}*{name}"] if count > 2 else [name] * count
    return " ".join(parts)


def short(dtype: str) -> str:
    """Shorten a dtype's name.

    Example:
        >>> short("bfloat16"), short("float32"), short("uint8"), short("float8_e4m3fn"), short("key<fry>")
        ('bf16', 'f32', 'u8', 'f8_e4m3fn', 'key<fry>')
    """
    if dtype in _SHORT:
        return _SHORT[dtype]
    for long, letter in _KINDS.items():
        if dtype.startswith(long):
            return letter + dtype.removeprefix(long)
    return dtype


def percent(share: float) -> str:
    """Write a share; what is there is never shown as 0, nor what is missing as all.

    Example:
        >>> percent(0.0), percent(0.00001), percent(0.125), percent(0.99999), percent(1.0)
        ('0%', '<0.1%', '12.5%', '>99.9%', '100%')
    """
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def losses_text(numbers: Numbers, dtype: str) -> str:
    """Say what a dtype would lose of some numbers, empty if nothing or if that is not known.

    Example:
        >>> from mezzo.report.numbers import Loss
        >>> losses_text(Numbers(4, 1e5, 1e-9, losses={"float16": Loss(overflow=0.25, underflow=0.5)}), "float16")
        '25% overflow, 50% to 0'
    """
    loss = numbers.losses.get(dtype)
    if loss is None:
        return ""
    shares = {"overflow": loss.overflow, "to 0": loss.underflow, "subnormal": loss.subnormal}
    return ", ".join(f"{percent(share)} {what}" for what, share in shares.items() if share)


def numbers_text(numbers: Numbers, *, losses: bool = True) -> str:
    """Say in one line how large some numbers are, and what the low dtypes would lose of them.

    Args:
        numbers: The numbers.
        losses: Whether to say what would be lost. Of an optimizer's numbers nothing is: none is ever cast low.

    Example:
        >>> from mezzo.report.numbers import Loss
        >>> numbers_text(Numbers(4, 1e5, 1e-9, nan=1, losses={"float16": Loss(overflow=0.25)}, error=0.01))
        'abs 1e-09 .. 1e+05, 1 NaN, float16: 25% overflow, error 0.01'
    """
    parts = [f"abs {numbers.min_abs:.3g} .. {numbers.max_abs:.3g}"]
    parts += [f"{count} {name}" for name, count in _bad(numbers) if count]
    parts += [f"{numbers.masked} Inf of masks"] if numbers.masked else []
    lost = {dtype: losses_text(numbers, dtype) for dtype in numbers.losses} if losses else {}
    parts += [f"{dtype}: {text}" for dtype, text in lost.items() if text]
    if numbers.error is not None:
        parts.append(f"error {numbers.error:.2g}")
    return ", ".join(parts)


def _bad(numbers: Numbers) -> tuple[tuple[str, int], ...]:
    return ("NaN", numbers.nan), ("Inf", numbers.bad_inf)
