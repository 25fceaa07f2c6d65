"""The one hook through which somebody can watch the rewrite: an event for each equation, with its rule and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from .internals import ClosedJaxpr
from .settings import Settings

__all__ = ["Event", "Observer", "current_observer", "observe"]


@dataclass(frozen=True)
class Event:
    """What the rewrite did with one equation.

    Attributes:
        key: Unique within a region: the places of the equations around it, then its own. An equation that is looked at
            twice, as loop bodies can be, has the same key both times.
        path: The equations around it in words, such as ``("jit relu", "scan")``.
        primitive: Canonical name of the primitive.
        rule: What was applied: the name of a cast policy, ``"enter"``, ``"explicit cast"`` or ``"no floats"``.
        reason: Why that is not the policy's rule; empty if it is.
        traced_in: Dtype names of the operands as traced; empty names for what has no dtype.
        traced_out: The same of the results.
        came: Dtypes that the operands had when the equation was reached.
        used: Dtypes with which it was bound.
        gave: Dtypes of its results.
        shapes_in: Shapes of the operands.
        shapes_out: Shapes of the results.
        eqn: The equation as traced.
    """

    key: tuple[Any, ...]
    path: tuple[str, ...]
    primitive: str
    rule: str
    reason: str
    traced_in: tuple[str, ...]
    traced_out: tuple[str, ...]
    came: tuple[str, ...]
    used: tuple[str, ...]
    gave: tuple[str, ...]
    shapes_in: tuple[tuple[Any, ...], ...]
    shapes_out: tuple[tuple[Any, ...], ...]
    eqn: Any


class Observer(Protocol):
    """What watches rewrites."""

    def tracing(self) -> AbstractContextManager[object]:
        """Be told that autocast is about to trace a function.

        Returns:
            What is entered while it does. Where autocast is applied inside of the function, it is entered again inside.
        """
        ...

    def region(self, name: str, settings: Settings, traced: ClosedJaxpr) -> Callable[[Event], None]:
        """Be told that autocast is applied to a function.

        Args:
            name: The function's name.
            settings: What it was asked for.
            traced: The function's program as traced. Constants in it may be tracers.

        Returns:
            What is called with each event of this application.
        """
        ...


_observer: ContextVar[Observer | None] = ContextVar("mezzo_jax_observer", default=None)


def current_observer() -> Observer | None:
    """Give who watches in this thread or task; None if nobody does."""
    return _observer.get()


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Have the rewrites of this thread or task watched; nested observers take turns, the inner one sees all.

    Args:
        observer: Who watches.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
