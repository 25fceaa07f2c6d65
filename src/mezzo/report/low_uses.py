"""Which results are in a low dtype, or are cast to one: of the others no low dtype can lose anything. No framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .records import OpRecord

__all__ = ["low_uses"]

_LOW = ("float16", "bfloat16")
_CASTS = ("aten::_to_copy", "aten::copy_", "convert_element_type")
Shape = tuple[int | str, ...]


def low_uses(records: Sequence[OpRecord]) -> list[frozenset[str]]:
    """Say of each record in which low dtypes its results are, or are read.

    Args:
        records: Records, in the order of time.

    Returns:
        One set for each. Records do not say who reads what: a cast counts for the last result of its dtype and shape in
        the same pass, unless it is one of a parameter.

    Example:
        >>> exp = OpRecord("exp", "fp32", gave=("float32",), shapes_out=((2, 3),))
        >>> mm = OpRecord("mm", "lower_precision_fp", came=("float32",), used=("float16",), gave=("float16",),
        ...               shapes_in=((2, 3),), shapes_out=((2, 2),))
        >>> [sorted(one) for one in low_uses([exp, exp, mm])]
        [[], ['float16'], ['float16']]
    """
    uses = [{dtype for dtype in record.gave if dtype in _LOW} for record in records]
    last: dict[tuple[str, str, Shape], int] = {}
    for index, record in enumerate(records):
        for came, shape, to in _casts(record):
            made = last.get((record.phase, came, shape))
            if made is not None and to in _LOW:
                uses[made].add(to)
        last.update({(record.phase, *one): index for one in zip(record.gave, record.shapes_out, strict=True)})
    return [frozenset(one) for one in uses]


def _casts(record: OpRecord) -> Iterator[tuple[str, Shape, str]]:
    """Give what is cast, its shape and the new dtype, for casts in front of an op and for an op that is a cast."""
    names = record.operands or ("",) * len(record.came)
    for name, came, used, shape in zip(names, record.came, record.used, record.shapes_in, strict=True):
        if came != used and not name:
            yield came, shape, used
    if record.op in _CASTS and record.used and record.gave and record.used[-1] != record.gave[0]:
        yield record.used[-1], record.shapes_in[-1], record.gave[0]
