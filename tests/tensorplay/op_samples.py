"""Arrays to call ops with: the same ones at every call, float32 or integers, small and far from an op's edges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Call", "call", "floats", "integers", "matrix", "normal", "positive", "spread", "symmetric", "unit"]


@dataclass(frozen=True)
class Call:
    """A call of one op with NumPy arrays in the place of tensors.

    Attributes:
        op: Canonical name.
        args: Positional arguments; float32 arrays stand for the tensors whose dtype is to be chosen.
        kwargs: Keyword arguments, likewise.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def call(op: str, *args: Any, **kwargs: Any) -> Call:
    """Note a call of an op.

    Args:
        op: Canonical name.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The call.
    """
    return Call(op, args, kwargs)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    """Give normal numbers that bfloat16 holds exactly, so that what differs later is the op and not its input.

    Args:
        *shape: Sizes.

    Returns:
        A float32 array of this shape.
    """
    numbers = np.random.default_rng([*shape, 7]).standard_normal(shape)
    return np.asarray(np.round(numbers * 16) / 16, dtype=np.float32)


def positive(*shape: int) -> np.ndarray[Any, Any]:
    """Give numbers from 0.5 to 1.5, which bfloat16 holds exactly.

    Args:
        *shape: Sizes.

    Returns:
        A float32 array of this shape.
    """
    numbers = np.random.default_rng([*shape, 8]).uniform(0.5, 1.5, shape)
    return np.asarray(np.round(numbers * 64) / 64, dtype=np.float32)


def unit(*shape: int) -> np.ndarray[Any, Any]:
    """Give numbers from 1/16 to 15/16: probabilities, or arguments of acos and the like.

    Args:
        *shape: Sizes.

    Returns:
        A float32 array of this shape.
    """
    numbers = np.random.default_rng([*shape, 9]).integers(1, 16, shape)
    return np.asarray(numbers / 16, dtype=np.float32)


def spread(*shape: int) -> np.ndarray[Any, Any]:
    """Give numbers that are all different by a quarter and more, for ops that choose the largest or sort.

    Args:
        *shape: Sizes.

    Returns:
        A float32 array of this shape.
    """
    count = int(np.prod(shape))
    numbers = np.random.default_rng([*shape, 10]).permutation(count) - count / 2
    return np.asarray(numbers.reshape(shape) / 4, dtype=np.float32)


def matrix(*shape: int) -> np.ndarray[Any, Any]:
    """Give well-conditioned square matrices.

    Args:
        *shape: Sizes, the last two alike.

    Returns:
        A float32 array of this shape.
    """
    return np.asarray(normal(*shape) / 4 + 2 * np.eye(shape[-1]), dtype=np.float32)


def symmetric(n: int) -> np.ndarray[Any, Any]:
    """Give a symmetric positive definite matrix with well separated eigenvalues.

    Args:
        n: Its size.

    Returns:
        A float32 array of shape ``(n, n)``.
    """
    numbers = normal(n, n) / 8
    return np.asarray(numbers + numbers.T + np.diag(np.arange(2, n + 2)), dtype=np.float32)


def integers(*numbers: Any) -> np.ndarray[Any, Any]:
    """Give indices.

    Args:
        *numbers: The numbers, or rows of them.

    Returns:
        An int64 array.
    """
    return np.asarray(numbers, dtype=np.int64)


def floats(tree: Any) -> list[np.ndarray[Any, Any]]:
    """List the float32 arrays of a call's arguments, in order.

    Args:
        tree: Arrays in lists, tuples and dicts.

    Returns:
        The arrays.
    """
    if isinstance(tree, np.ndarray):
        return [tree] if tree.dtype == np.float32 else []
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for branch in tree for leaf in floats(branch)] if isinstance(tree, list | tuple) else []
