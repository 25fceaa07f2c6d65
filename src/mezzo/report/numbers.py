"""How large the numbers of a tensor are, and what of them a lower precision would lose, as data. No framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

__all__ = ["Loss", "Numbers"]


@dataclass(frozen=True)
class Loss:
    """What a dtype would do to some numbers: shares of all of them, from 0 to 1.

    Attributes:
        overflow: Finite numbers that would become infinite.
        underflow: Numbers other than 0 that would become 0.
        subnormal: Numbers that would become subnormal ones, which have fewer digits than the dtype's others.

    Example:
        >>> Loss(underflow=0.25).as_dict()
        {'overflow': 0.0, 'underflow': 0.25, 'subnormal': 0.0}
    """

    overflow: float = 0.0
    underflow: float = 0.0
    subnormal: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Give it as plain data that JSON can hold."""
        return {"overflow": self.overflow, "underflow": self.underflow, "subnormal": self.subnormal}


@dataclass(frozen=True)
class Numbers:
    """How large the numbers of a tensor are. A value that can be hashed, pickled and copied; threads may share one.

    Attributes:
        elements: How many there are; of a complex tensor, both parts count.
        max_abs: The largest finite absolute value; 0.0 if there is none.
        min_abs: The smallest finite absolute value above 0; 0.0 if there is none.
        nan: How many are NaN.
        inf: How many are Inf or -Inf.
        losses: What ``"float16"`` and ``"bfloat16"`` would do to them. The mapping cannot be changed.
        exponents: From the exponent e of 2, ascending, to how many numbers x have 2**e <= abs(x) < 2**(e + 1). Zeros,
            NaN and Inf are in none. The mapping cannot be changed.
        error: How far they are from a run in float32, as a share: the norm of the difference over the norm of the
            float32 result, and of several results the largest; None if there was no such run.
        masked: How many of the ``inf`` are a mask's, which the program wrote on purpose: no fault.

    Example:
        >>> few = Numbers(4, max_abs=3.0, min_abs=0.5, losses={"float16": Loss()}, exponents={1: 1, -1: 2})
        >>> few.zeros, dict(few.exponents)
        (1, {-1: 2, 1: 1})
        >>> few == Numbers(4, 3.0, 0.5, losses={"float16": Loss()}, exponents={-1: 2, 1: 1})
        True
    """

    elements: int
    max_abs: float
    min_abs: float
    nan: int = 0
    inf: int = 0
    losses: Mapping[str, Loss] = field(default_factory=dict)
    exponents: Mapping[int, int] = field(default_factory=dict)
    error: float | None = None
    masked: int = 0

    def __post_init__(self) -> None:
        """Keep the mappings from being changed."""
        object.__setattr__(self, "losses", MappingProxyType(dict(self.losses)))
        object.__setattr__(self, "exponents", MappingProxyType(dict(sorted(self.exponents.items()))))

    def __hash__(self) -> int:
        counts = (self.elements, self.nan, self.inf, self.masked)
        return hash((*counts, self.max_abs, self.min_abs, self.error, *self.exponents.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping that cannot be changed cannot be pickled either.
        values = (getattr(self, one.name) for one in fields(self))
        return Numbers, tuple(dict(value) if isinstance(value, Mapping) else value for value in values)

    @property
    def zeros(self) -> int:
        """How many are 0; right only where ``exponents`` was filled in."""
        return self.elements - self.nan - self.inf - sum(self.exponents.values())

    @property
    def finite(self) -> bool:
        """Whether none is NaN or Inf."""
        return not (self.nan or self.inf)

    @property
    def bad_inf(self) -> int:
        """How many are Inf or -Inf and no mask's."""
        return self.inf - self.masked

    @staticmethod
    def merge(many: Iterable[Numbers]) -> Numbers:
        """Add up the numbers of several tensors, or of several calls.

        Args:
            many: What to add up; nothing gives the numbers of an empty tensor.

        Returns:
            Counts are summed, extremes are those of all, shares are weighted by the elements of those that have them, and
            the error is the largest: what one op lost is not made good by another's exact result.

        Example:
            >>> one = Numbers(1, 4.0, 4.0, losses={"float16": Loss(overflow=1.0)}, error=0.5)
            >>> both = Numbers.merge([one, Numbers(3, 1.0, 0.5, nan=1, losses={"float16": Loss()})])
            >>> both.elements, both.max_abs, both.min_abs, both.nan, both.losses["float16"].overflow, both.error
            (4, 4.0, 0.5, 1, 0.25, 0.5)
        """
        all_of = [*many]
        exponents: Counter[int] = Counter()
        for one in all_of:
            exponents.update(one.exponents)
        errors = [one.error for one in all_of if one.error is not None]
        dtypes = dict.fromkeys(dtype for one in all_of for dtype in one.losses)
        return Numbers(
            elements=sum(one.elements for one in all_of),
            max_abs=max((one.max_abs for one in all_of), default=0.0),
            min_abs=min((one.min_abs for one in all_of if one.min_abs), default=0.0),
            nan=sum(one.nan for one in all_of),
            inf=sum(one.inf for one in all_of),
            losses={dtype: _mean_loss(dtype, all_of) for dtype in dtypes},
            exponents=exponents,
            error=max(errors, default=None),
            masked=sum(one.masked for one in all_of),
        )

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain data that JSON can hold; the exponents are strings there, as JSON's keys must be."""
        return {
            "elements": self.elements,
            "max_abs": self.max_abs,
            "min_abs": self.min_abs,
            "nan": self.nan,
            "inf": self.inf,
            "losses": {dtype: loss.as_dict() for dtype, loss in self.losses.items()},
            "exponents": {str(exponent): count for exponent, count in self.exponents.items()},
            "error": self.error,
            "masked": self.masked,
        }


def _mean_loss(dtype: str, many: list[Numbers]) -> Loss:
    weighted = [(one.elements, one.losses[dtype]) for one in many if dtype in one.losses]
    elements = sum(weight for weight, _ in weighted) or 1

    def mean(name: str) -> float:
        return float(sum(weight * getattr(loss, name) for weight, loss in weighted) / elements)

    return Loss(mean("overflow"), mean("underflow"), mean("subnormal"))
