"""What the rewrite knows of each array beside the array: where it came from decides whether it adapts to others.

JAX traces ``x * 2.0`` as a product with a float32 literal, and a bias as a float32 array: taken at their word, both would
turn every activation back into float32. So a value remembers whether it consists of literals only, and whether it is
an input or a constant that was merely stored in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
from jax import dtypes, lax
from jax.numpy import bfloat16, finfo, issubdtype

__all__ = [
    "BFLOAT16",
    "BOOL",
    "FLOAT16",
    "FLOAT32",
    "LOW",
    "Storage",
    "Value",
    "cast",
    "combine",
    "dtype_name",
    "dtype_of",
    "is_float",
    "known_number",
    "representable",
    "rounded",
]

FLOAT32 = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(bfloat16)
BOOL = np.dtype(bool)
LOW = {"bfloat16": BFLOAT16, "float16": FLOAT16}
"""The lower-precision dtypes by name."""

_MOST_CONSTANTS = 16
"""How many possible numbers of a value are followed. Masks have two or three."""


class Storage(Enum):
    """Why an array is float32.

    Attributes:
        NO: It was computed so.
        SAME: It is an input or a constant, perhaps with its elements moved.
        REPEATED: So it is, and it was broadcast.
    """

    NO = 0
    SAME = 1
    REPEATED = 2


@dataclass(slots=True, eq=False)
class Value:
    """An array of the rewritten program.

    Attributes:
        array: The array or tracer, in the dtype that it has now.
        constants: If it is made of literals and masks only: every number that it can hold. Else None.
        storage: Whether it is float32 only because it is stored so.
        still: Whether no gradient goes through it.
        wide: The array in float32, once somebody has asked for that.
    """

    array: Any
    constants: frozenset[float] | None = None
    storage: Storage = Storage.NO
    still: bool = False
    wide: Any = field(default=None, init=False)


@cache
def is_float(dtype: Any) -> bool:
    """Say whether a dtype is one that autocast may cast from or to: float32, bfloat16 or float16."""
    return dtype in (FLOAT32, BFLOAT16, FLOAT16)


@cache
def dtype_name(dtype: Any) -> str:
    """Name a dtype, extended ones too (``key<fry>``); empty for what has none, such as a token."""
    return "" if dtype is None else getattr(dtype, "name", str(dtype))


@cache
def obstacle(dtype: Any) -> str:
    """Say why autocast leaves alone an equation that has a float operand of this dtype; empty if it does not."""
    if dtype is None or is_float(dtype) or issubdtype(dtype, dtypes.extended):
        return ""
    if issubdtype(dtype, np.complexfloating):
        return "complex operand"
    return f"{dtype_name(dtype)} operand" if issubdtype(dtype, np.floating) else ""


def dtype_of(thing: Any) -> Any:
    """Give the dtype of an array, a tracer or an abstract value; None if it has none."""
    return getattr(thing, "dtype", None)


def cast(array: Any, dtype: Any) -> Any:
    """Cast an array; at once if it is a literal, else by an equation. Nothing if it has the dtype already."""
    if array.dtype == dtype:
        return array
    if isinstance(array, np.ndarray | np.generic) and array.ndim == 0:
        with np.errstate(over="ignore"):
            return np.asarray(array).astype(dtype)
    return lax.convert_element_type(array, dtype)


@cache
def representable(numbers: frozenset[float], dtype: Any) -> bool:
    """Say whether numbers survive a lower precision: none overflows, none loses digits for being too small.

    Args:
        numbers: The possible numbers of a value made of literals.
        dtype: The lower-precision dtype.

    Returns:
        False if one of them becomes infinite there, or is below the smallest normal number and not zero.
    """
    limits = finfo(dtype)
    largest, smallest = float(limits.max), float(limits.tiny)
    return all(number == 0 or not np.isfinite(number) or smallest <= abs(number) <= largest for number in numbers)


def known_number(number: Any) -> float:
    """Give a number as Python's own; every NaN as the same object, as sets compare by identity first."""
    plain = float(number)
    return math.nan if math.isnan(plain) else plain


def rounded(numbers: frozenset[float], dtype: Any) -> frozenset[float]:
    """Give the numbers that are left of some in another dtype."""
    with np.errstate(over="ignore"):
        return frozenset(known_number(np.asarray(number).astype(dtype)) for number in numbers)


_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
    "min": min,
    "neg": lambda a: -a,
    "abs": abs,
    "sqrt": math.sqrt,
    "rsqrt": lambda a: 1 / math.sqrt(a),
    "cbrt": lambda a: math.copysign(abs(a) ** (1 / 3), a),
    "exp": math.exp,
    "exp2": lambda a: 2.0**a,
    "expm1": math.expm1,
    "log": math.log,
    "log1p": math.log1p,
    "square": lambda a: a * a,
    "pow": math.pow,
    "integer_pow": lambda a, *, y: a**y,
    "sin": math.sin,
    "cos": math.cos,
    "tanh": math.tanh,
    "logistic": lambda a: 1 / (1 + math.exp(-a)),
    "erf": math.erf,
}
"""How far a number is from zero decides whether it fits, so that the last digits need not be the device's."""


def combine(primitive: str, operands: Sequence[frozenset[float]], **parameters: Any) -> frozenset[float] | None:
    """Follow the possible numbers of values that are made of literals through an equation.

    Args:
        primitive: Its canonical name.
        operands: The possible numbers of each float operand.
        **parameters: The equation's parameters.

    Returns:
        Those of the result; None if there are too many, or the primitive does more than arithmetic.

    Example:
        >>> sorted(combine("mul", [frozenset({0.0, 1.0}), frozenset({-1e9})]))
        [-1000000000.0, -0.0]
    """
    if primitive in ("select_n", "concatenate", "pad", "clamp"):
        found = frozenset().union(*operands)
    elif primitive in _ARITHMETIC:
        try:
            chosen = {"y": parameters["y"]} if primitive == "integer_pow" else {}
            found = frozenset(
                known_number(_ARITHMETIC[primitive](*each, **chosen)) for each in itertools.product(*operands)
            )
        except (ArithmeticError, ValueError):
            return None
    else:
        return None
    return found if len(found) <= _MOST_CONSTANTS else None
