"""What one op did under mixed precision, as data: the dtypes that came, reached it and left, and the casts in between.

No framework. An adapter fills these in from what its engine tells an observer; `mezzo.report` adds them up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from .numbers import Numbers

__all__ = ["Cast", "OpRecord", "SourceLine", "itemsize"]

_BITS = {
    "bool": 8,
    "bfloat16": 16,
    "complex32": 32,
    "complex64": 64,
    "complex128": 128,
    **{f"{sign}int{bits}": bits for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)},
    **{f"float{bits}": bits for bits in (16, 32, 64)},
    "qint8": 8,
    "quint8": 8,
    "qint32": 32,
    "quint4x2": 4,
    "quint2x4": 2,
}


def itemsize(dtype: str) -> float:
    """Say how many bytes an element of a dtype takes.

    Args:
        dtype: The dtype's name, without the framework's prefix.

    Returns:
        Bytes, a fraction for dtypes that share a byte; 0 for a dtype whose elements have no fixed size here, such as
        a random key.

    Example:
        >>> itemsize("bfloat16"), itemsize("float8_e4m3fn"), itemsize("int4"), itemsize("key<fry>")
        (2.0, 1.0, 0.5, 0.0)
    """
    for start, bits in (("float8_", 8), ("float6_", 6), ("float4_", 4)):
        if dtype.startswith(start):
            return bits / 8
    return _BITS.get(dtype, 0) / 8


def _elements(shape: tuple[int | str, ...]) -> int:
    return math.prod(size for size in shape if isinstance(size, int))


@dataclass(frozen=True, order=True)
class SourceLine:
    """A line of code.

    Attributes:
        file: The file, as the framework recorded it.
        line: The line, from 1.
        function: The function it is in; empty if that is not known.

    Example:
        >>> str(SourceLine("/home/me/nets/model.py", 31, "attention"))
        'nets/model.py:31 (attention)'
    """

    file: str
    line: int
    function: str = ""

    @property
    def place(self) -> str:
        """File and line, the file by its last two parts."""
        return f"{'/'.join(PurePath(self.file).parts[-2:])}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place} ({self.function})" if self.function else self.place


@dataclass(frozen=True)
class Cast:
    """A cast that mezzo put in front of an op.

    Attributes:
        operand: Which operand of the op, from 0.
        came: The dtype it had.
        used: The dtype it was cast to.
        elements: How many elements it has.

    Example:
        >>> cast = Cast(0, "float32", "bfloat16", 100)
        >>> cast.bytes_read, cast.bytes_written
        (400, 200)
    """

    operand: int
    came: str
    used: str
    elements: int

    @property
    def bytes_read(self) -> int:
        """Bytes of what was cast."""
        return math.ceil(self.elements * itemsize(self.came))

    @property
    def bytes_written(self) -> int:
        """Bytes of the result."""
        return math.ceil(self.elements * itemsize(self.used))


@dataclass(frozen=True)
class OpRecord:
    """What happened to one op. A value without tensors: it keeps nothing alive.

    Attributes:
        op: The op's canonical name.
        rule: What was applied to it: a cast policy's name, or what else the engine did with it.
        reason: Why it was not the rule of the policy's table; empty if it was.
        path: Where it was called: enclosing modules or sub-programs, outermost first.
        source: The user's line, None if it is not known.
        came: The dtypes of its operands as they came.
        used: The dtypes that reached the op; an entry that differs from ``came`` is a cast by mezzo.
        gave: The dtypes of its results.
        traced_in: The dtypes the operands have without autocast; empty where that is not known.
        traced_out: The same of the results.
        shapes_in: The shapes of the operands; a size that is known by a name only is that name, and counts as 1.
        shapes_out: The shapes of the results.
        dot: Whether it is a matrix product or convolution.
        encloses: Whether it only calls other ops, which have records of their own.
        times: How often it runs in one call, such as the length of the loop it is in; None if the program decides while
            it runs.
        phase: The pass it belongs to: ``"forward"``, or what else the adapter tells apart.
        kept: Which operands came by a cast that was made earlier and kept, from 0: ``came`` is what the kept cast was made
            from, and no cast was made now.
        operands: What the operands are called: a parameter's name, empty where there is none. No entry at all, or one for
            each.
        rank: The rank of the process in its group; None if there is no group.
        numbers: How large its results are, and what of them a lower precision would lose; None if that was not asked for.

    Raises:
        ValueError: ``came``, ``used`` and ``shapes_in`` have not the same length, or ``gave`` and ``shapes_out`` have not.

    Example:
        >>> record = OpRecord("dot_general", "lower_precision_fp", came=("float32", "bfloat16"),
        ...                   used=("bfloat16", "bfloat16"), gave=("bfloat16",),
        ...                   shapes_in=((8, 4), (4, 2)), shapes_out=((8, 2),), dot=True)
        >>> record.casts
        (Cast(operand=0, came='float32', used='bfloat16', elements=32),)
        >>> record.changed
        True
    """

    op: str
    rule: str
    reason: str = ""
    path: tuple[str, ...] = ()
    source: SourceLine | None = None
    came: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    gave: tuple[str, ...] = ()
    traced_in: tuple[str, ...] = ()
    traced_out: tuple[str, ...] = ()
    shapes_in: tuple[tuple[int | str, ...], ...] = ()
    shapes_out: tuple[tuple[int | str, ...], ...] = ()
    dot: bool = False
    encloses: bool = False
    times: int | None = 1
    phase: str = "forward"
    kept: tuple[int, ...] = ()
    operands: tuple[str, ...] = ()
    rank: int | None = None
    numbers: Numbers | None = None
    key: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check that the operands and results are told apart the same way everywhere."""
        if not len(self.came) == len(self.used) == len(self.shapes_in):
            msg = (
                f"A record of {self.op!r} has {len(self.came)} dtypes that came, {len(self.used)} that were used and "
                f"{len(self.shapes_in)} shapes; it needs one of each for every operand."
            )
            raise ValueError(msg)
        if len(self.gave) != len(self.shapes_out):
            msg = (
                f"A record of {self.op!r} has {len(self.gave)} dtypes and {len(self.shapes_out)} shapes of results; "
                "it needs one of each for every result."
            )
            raise ValueError(msg)

    @property
    def casts(self) -> tuple[Cast, ...]:
        """The casts that mezzo put in front of it."""
        pairs = zip(self.came, self.used, self.shapes_in, strict=True)
        return tuple(
            Cast(operand, came, used, _elements(shape))
            for operand, (came, used, shape) in enumerate(pairs)
            if came != used and operand not in self.kept
        )

    @property
    def bytes_written(self) -> int:
        """Bytes of its results."""
        pairs = zip(self.gave, self.shapes_out, strict=True)
        return sum(math.ceil(itemsize(dtype) * _elements(shape)) for dtype, shape in pairs)

    @property
    def changed(self) -> bool:
        """Whether an operand or a result has another dtype than without autocast, or was cast."""
        return bool(
            self.casts
            or (self.traced_in and self.used != self.traced_in)
            or (self.traced_out and self.gave != self.traced_out)
        )

    @property
    def floats(self) -> bool:
        """Whether a floating-point or complex number goes in or out."""
        dtypes = (*self.came, *self.used, *self.gave)
        return any(dtype.startswith(("float", "bfloat", "complex")) for dtype in dtypes)

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold.

        Returns:
            One flat dictionary; tuples are lists, ``path`` is joined with ``/``, and ``casts`` and ``cast_bytes`` are added.
        """
        casts = self.casts
        return {
            "op": self.op,
            "rule": self.rule,
            "reason": self.reason,
            "path": "/".join(self.path),
            "file": self.source.file if self.source else None,
            "line": self.source.line if self.source else None,
            "function": self.source.function if self.source else None,
            "traced_in": list(self.traced_in),
            "traced_out": list(self.traced_out),
            "came": list(self.came),
            "used": list(self.used),
            "gave": list(self.gave),
            "shapes_in": [list(shape) for shape in self.shapes_in],
            "shapes_out": [list(shape) for shape in self.shapes_out],
            "dot": self.dot,
            "encloses": self.encloses,
            "times": self.times,
            "phase": self.phase,
            "kept": list(self.kept),
            "operands": list(self.operands),
            "rank": self.rank,
            "numbers": self.numbers.as_dict() if self.numbers else None,
            "bytes_written": self.bytes_written,
            "casts": len(casts),
            "cast_bytes": sum(cast.bytes_read + cast.bytes_written for cast in casts),
        }
