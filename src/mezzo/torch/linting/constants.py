"""What becomes of a constant in a lower precision: whether it is still there, has become 1, or is infinite."""

from __future__ import annotations

import math

__all__ = ["becomes_infinite", "becomes_one", "largest", "rounded", "smallest", "vanishes"]

# Digits of the significand in bits, the exponent of the smallest normal number, and of the largest.
_FORMATS = {"float16": (11, -14, 15), "bfloat16": (8, -126, 127)}


def rounded(value: float, dtype: str) -> float:
    """Round a number to the nearest one of a dtype, ties to even, as a cast does.

    Args:
        value: Any number.
        dtype: ``"float16"`` or ``"bfloat16"``.

    Returns:
        The number; infinite where the dtype does not go so far.

    Source: IEEE 754-2019, section 4.3.1 (roundTiesToEven); bfloat16 has the exponents of float32 and 8 bits of precision.

    Example:
        >>> rounded(1e-8, "float16"), rounded(-1e9, "float16"), rounded(1 - 1e-7, "bfloat16")
        (0.0, -inf, 1.0)
    """
    if value == 0 or not math.isfinite(value):
        return float(value)
    digits, low, high = _FORMATS[dtype]
    exponent = max(math.frexp(value)[1] - 1, low)
    step = math.ldexp(1.0, exponent - digits + 1)
    result = round(value / step) * step
    return math.copysign(math.inf, value) if abs(result) >= math.ldexp(1.0, high + 1) else result


def vanishes(value: float, dtype: str) -> bool:
    """Say whether a number other than 0 is 0 in a dtype.

    Example:
        >>> vanishes(1e-8, "float16"), vanishes(1e-7, "float16"), vanishes(1e-8, "bfloat16")
        (True, False, False)
    """
    return value != 0 and rounded(value, dtype) == 0


def becomes_one(value: float, dtype: str) -> bool:
    """Say whether a number a little below 1 is 1 in a dtype, so that ``1 - value`` is 0.

    Example:
        >>> becomes_one(1 - 1e-7, "float16"), becomes_one(0.999, "float16"), becomes_one(0.999, "bfloat16")
        (True, False, True)
    """
    return 0 < value < 1 and rounded(value, dtype) == 1


def becomes_infinite(value: float, dtype: str) -> bool:
    """Say whether a finite number is infinite in a dtype.

    Example:
        >>> becomes_infinite(-1e9, "float16"), becomes_infinite(-1e9, "bfloat16"), becomes_infinite(-math.inf, "float16")
        (True, False, False)
    """
    return math.isfinite(value) and math.isinf(rounded(value, dtype))


def smallest(dtype: str) -> float:
    """Give the smallest number above 0.

    Example:
        >>> smallest("float16")
        5.960464477539063e-08
    """
    digits, low, _ = _FORMATS[dtype]
    return math.ldexp(1.0, low - digits + 1)


def largest(dtype: str) -> float:
    """Give the largest finite number.

    Example:
        >>> largest("float16")
        65504.0
    """
    digits, _, high = _FORMATS[dtype]
    return (2 - math.ldexp(1.0, 1 - digits)) * math.ldexp(1.0, high)
