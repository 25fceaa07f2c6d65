"""What a piece of work is, to those who build it and to those who time it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Work(NamedTuple):
    """``loop(n)`` does the work n times; ``probe()`` once, and describes the result as dtype and value.

    Where the work uses up what it works on, ``between()`` puts that right before each iteration, outside of the timed
    part.
    """

    loop: Callable[[int], None]
    probe: Callable[[], tuple[str, float]]
    between: Callable[[], None] | None = None


def describe(result: Tensor) -> tuple[str, float]:
    return str(result.dtype), float(result.detach().double().square().mean())
