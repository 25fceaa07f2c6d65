"""Which Inf is a mask that the program wrote, and no fault. No framework.

Numbers say how many are Inf, and not why. A program masks with -Inf on purpose: it fills a tensor with it and adds that to
its scores. An Inf counts as a mask's where the records leave no other explanation, and as a fault everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from .numbers import Numbers
from .records import OpRecord, itemsize

__all__ = ["with_masks_marked"]

_FORWARD = ("forward", "recomputation")
# They write the value that they are told, or choose among values: none makes an Inf by computing.
_FILLS = {"full", "full_like", "new_full", "fill", "scalar_tensor", "masked_fill", "where", "index_fill", "index_put",
          "_index_put_impl", "constant_pad_nd", "triu", "tril"}  # fmt: skip
_MOVES = {
    "add",
    "sub",
    "rsub",
    "_to_copy",
    "copy",
    "clone",
    "cat",
    "stack",
    "repeat",
    "index",
    "index_select",
    "gather",
}
_KEEPS = {"mul", "div", "neg"}
_LARGEST = {"float16": 65504.0}


def with_masks_marked(records: Sequence[OpRecord]) -> tuple[OpRecord, ...]:
    """Count as ``masked`` what is Inf in a result because the program filled it in.

    Args:
        records: All that ran, in the order of time.

    Returns:
        The records. A result counts whose numbers have Inf and no NaN, in the forward pass: of an op that fills, of one
        that hands on the same share of Inf as a mask before it, and of a sum or a copy if all numbers up to there are too
        small for a sum to overflow. After a fault in the forward pass only the second counts.

    Example:
        >>> from mezzo.report.numbers import Numbers
        >>> mask = OpRecord("aten::masked_fill", "not listed", numbers=Numbers(4, 1.0, 1.0, inf=2))
        >>> fault = OpRecord("aten::exp", "not listed", numbers=Numbers(4, 1.0, 1.0, inf=1))
        >>> [record.numbers.masked for record in with_masks_marked([mask, fault])]
        [2, 0]
    """
    if not any(record.numbers is not None and record.numbers.inf for record in records):
        return tuple(records)
    masks = _Masks()
    return tuple(masks.seen(record) for record in records)


class _Masks:
    """What is known up to a record: the masks' shares of Inf, the largest number, whether a fault came before."""

    def __init__(self) -> None:
        self._shares: set[Fraction] = set()
        self._largest = 0.0
        self._fault = False

    def seen(self, record: OpRecord) -> OpRecord:
        numbers = record.numbers
        if numbers is None or record.phase not in _FORWARD:
            return record
        self._largest = max(self._largest, numbers.max_abs)
        if numbers.finite:
            return record
        if numbers.nan or not self._is_mask(record, numbers):
            self._fault = True
            return record
        share = Fraction(numbers.inf, numbers.elements)
        if share < 1:
            # A tensor that is Inf throughout has the share of any tensor that overflows throughout.
            self._shares.add(share)
        return replace(record, numbers=replace(numbers, masked=numbers.inf))

    def _is_mask(self, record: OpRecord, numbers: Numbers) -> bool:
        name = record.op.removeprefix("aten::").partition(".")[0].rstrip("_")
        if name in _FILLS | _MOVES | _KEEPS and Fraction(numbers.inf, numbers.elements) in self._shares:
            return True
        if self._fault:
            return False
        return name in _FILLS or (name in _MOVES and not _narrows(record) and self._is_small(record))

    def _is_small(self, record: OpRecord) -> bool:
        """Say whether no sum of two numbers seen so far comes near the end of the dtype."""
        largest = min((_LARGEST.get(dtype, 3.3e38) for dtype in record.gave), default=0.0)
        return self._largest < largest / 4


def _narrows(record: OpRecord) -> bool:
    """Say whether a cast to a dtype of fewer bytes is in it, which may make Inf of what no record told of."""
    came, went = _sizes(record.came), _sizes((*record.used, *record.gave))
    return bool(came and went) and max(came) > min(went)


def _sizes(dtypes: Iterable[str]) -> list[float]:
    return [itemsize(dtype) for dtype in dtypes if dtype.startswith(("float", "bfloat"))]
