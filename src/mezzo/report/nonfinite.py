"""What a search for non-finite numbers found, as data and as text. No framework and no terminal library."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from .records import SourceLine

__all__ = ["EarlierOp", "NonFiniteOp", "NonFiniteReport", "OperandRange"]


_SHOWN = 5
"""How many parameters the text names; the data has all."""


@dataclass(frozen=True)
class OperandRange:
    """How large the numbers of an operand were.

    Attributes:
        dtype: The dtype in which it came to the op.
        shape: Its shape.
        low: The smallest finite number; None if there is none.
        high: The largest finite number; None if there is none.
        nan: How many were NaN.
        inf: How many were Inf or -Inf.
        name: The parameter that it is, or is a view of; empty if none.

    Example:
        >>> print(OperandRange("float16", (4, 8), -3.5, 300.0))
        float16 (4, 8) from -3.5 to 300
    """

    dtype: str
    shape: tuple[int | str, ...]
    low: float | None
    high: float | None
    nan: int = 0
    inf: int = 0
    name: str = ""

    def __str__(self) -> str:
        name = f"{self.name}: " if self.name else ""
        shape = f"({', '.join(map(str, self.shape))})" if self.shape else "(a number)"
        numbers = "nothing finite" if self.low is None else f"from {self.low:.4g} to {self.high:.4g}"
        counts = ", ".join(f"{count} {what}" for count, what in ((self.nan, "NaN"), (self.inf, "Inf")) if count)
        return f"{name}{self.dtype} {shape} {numbers}" + (f", {counts}" if counts else "")

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold."""
        return {**vars(self), "shape": list(self.shape)}


@dataclass(frozen=True)
class EarlierOp:
    """An op that ran before the one that was found.

    Attributes:
        op: Its name.
        path: The module, empty outside of any.
        source: The user's line.
        phase: The pass.
        used: The dtypes of its operands.
        gave: The dtypes of its results.
    """

    op: str
    path: tuple[str, ...]
    source: SourceLine | None
    phase: str
    used: tuple[str, ...]
    gave: tuple[str, ...]

    def __str__(self) -> str:
        where = "/".join(self.path) or "(outside of modules)"
        dtypes = f"{' x '.join(self.used)} -> {', '.join(self.gave)}"
        return f"{self.op.removeprefix('aten::')} in {where}, {self.phase}: {dtypes}"

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold."""
        return {
            "op": self.op,
            "path": "/".join(self.path),
            "file": self.source.file if self.source else None,
            "line": self.source.line if self.source else None,
            "function": self.source.function if self.source else None,
            "phase": self.phase,
            "used": list(self.used),
            "gave": list(self.gave),
        }


@dataclass(frozen=True)
class NonFiniteOp:
    """The first op whose result is not finite though what went in is.

    Attributes:
        kind: What appeared: ``"NaN"``, ``"Inf"`` or ``"-Inf"``; ``"NaN"`` if several.
        op: The op, as a policy names it: ``"aten::linear"``.
        seen_as: The kernel that really ran, ``"aten::addmm"``.
        path: The module, as ``model.named_modules()`` names it; empty outside of any.
        source: The user's line.
        phase: ``"forward"``, ``"backward"``, ``"recomputation"`` or ``"optimizer"``.
        rule: The rule by which it was cast, as in a record of `mezzo.torch.explain`.
        dtype: The dtype of the result.
        shape: Its shape.
        nan: How many numbers of the result are NaN.
        inf: How many are Inf or -Inf.
        operands: The ranges of what went in.
        cause: What happened, as far as it can be told.
        cause_kind: In a word that programs can compare: ``"range"``, ``"cast"``, ``"domain"``, ``"came in"`` or
            ``"unknown"``.
        advice: What to do about it: each a sentence, lines to paste among them.
        before: The last ops before it, the latest last.
        rank: The rank of the process; None if there is no group.
    """

    kind: str
    op: str
    seen_as: str
    path: tuple[str, ...]
    source: SourceLine | None
    phase: str
    rule: str
    dtype: str
    shape: tuple[int | str, ...]
    nan: int
    inf: int
    operands: tuple[OperandRange, ...]
    cause: str
    cause_kind: str = "unknown"
    advice: tuple[str, ...] = ()
    before: tuple[EarlierOp, ...] = ()
    rank: int | None = None

    @property
    def elements(self) -> int:
        """How many numbers the result has."""
        product = 1
        for size in self.shape:
            product *= size if isinstance(size, int) else 1
        return product

    def __str__(self) -> str:
        came_in = self.cause_kind == "came in"
        kernel = f" (as {self.seen_as.removeprefix('aten::')})" if self.seen_as != self.op and not came_in else ""
        where = "/".join(self.path) or "(outside of modules)"
        verb = "comes in to" if came_in else "first appears in"
        counts = ", ".join(f"{count} {what}" for count, what in ((self.nan, "NaN"), (self.inf, "Inf")) if count)
        lines = [
            f"{self.kind} {verb} {self.op.removeprefix('aten::')}{kernel} of {where}, {self.phase} pass",
            f"  line     {self.source or 'not known'}",
            f"  {'operand ' if came_in else 'result  '} {self.dtype}: {counts} of {self.elements}",
            f"  rule     {self.rule}",
            *(f"  {'operands' if not number else '':<8} {one}" for number, one in enumerate(self.operands)),
            *_wrapped("cause", self.cause),
            *(line for number, one in enumerate(self.advice) for line in _wrapped("do" if not number else "or", one)),
            *(f"  {'before' if not number else '':<8} {one}" for number, one in enumerate(self.before)),
        ]
        if self.rank is not None:
            lines.insert(1, f"  rank     {self.rank}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold."""
        return {
            **{name: value for name, value in vars(self).items() if name != "source"},
            "path": "/".join(self.path),
            "file": self.source.file if self.source else None,
            "line": self.source.line if self.source else None,
            "function": self.source.function if self.source else None,
            "shape": list(self.shape),
            "elements": self.elements,
            "operands": [one.as_dict() for one in self.operands],
            "advice": list(self.advice),
            "before": [one.as_dict() for one in self.before],
        }


def _wrapped(name: str, text: str) -> list[str]:
    if "\n" in text:  # lines to paste stay as they are
        head, *code = text.split("\n")
        return [*_wrapped(name, head), *(f"             {line}" for line in code)]
    lines = textwrap.wrap(text, 98, break_long_words=False, break_on_hyphens=False)
    return [f"  {name if not number else '':<8} {line}" for number, line in enumerate(lines)]


@dataclass(frozen=True)
class NonFiniteReport:
    """What a search found.

    Attributes:
        first: The op; None if none was found.
        parameters: The parameters whose gradients were not finite at the end, each as a text with its name and counts.
        ops: How many ops were looked at.
        notes: What could not be looked at, and what was taken for intended: masks of -Inf.

    Example:
        >>> print(NonFiniteReport(None, (), 12))
        12 ops, all finite
    """

    first: NonFiniteOp | None
    parameters: tuple[str, ...]
    ops: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [str(self.first) if self.first else f"{self.ops} ops, all finite"]
        if self.parameters:
            lines += [f"gradients that are not finite ({len(self.parameters)})"]
            lines += [f"  {one}" for one in self.parameters[:_SHOWN]]
            more = len(self.parameters) - _SHOWN
            lines += [f"  and {more} more"] if more > 0 else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold.

        Returns:
            ``first`` (None or its attributes, the path joined with ``/`` and the source as ``file`` and ``line``),
            ``parameters``, ``ops`` and ``notes``.
        """
        return {
            "first": self.first.as_dict() if self.first else None,
            "parameters": list(self.parameters),
            "ops": self.ops,
            "notes": list(self.notes),
        }
