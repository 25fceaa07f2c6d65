"""How the places of ops are wrapped while regions are open, and put back.

The wrappers stand in the place of the functions when the first region that needs them opens anywhere in the process, and
what stood there is back when the last one closes. Calls that C++ makes inside an op, and backward passes, do not come by.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any

from mezzo.tensorplay.places import Place, places

__all__ = ["acquire", "changed_names", "open_regions", "release", "replace_while_open"]

Wrap = Callable[[str, Any], Any]
"""Makes the replacement: from an op's name, or another label, and what stands there."""

_lock = threading.RLock()


class _Held(threading.local):
    """The sets of ops that this thread's open regions need."""

    def __init__(self) -> None:
        self.ops: list[tuple[frozenset[str], Wrap]] = []


_held = _Held()
_needed: dict[frozenset[str], int] = {}
"""Sets of ops that open regions need, and how many regions."""
_seen: set[frozenset[str]] = set()
"""All such sets that were ever needed."""
_beside: dict[Place, Wrap] = {}


def replace_while_open(place: Place, wrap: Wrap) -> None:
    """Have an attribute replaced whenever any region is open, whatever its policy.

    Args:
        place: The attribute.
        wrap: Makes the replacement from the place's label and what stands there.
    """
    _beside[place] = wrap
    _batches_beside.cache_clear()


def acquire(ops: frozenset[str], wrap: Wrap) -> None:
    """Wrap ops at all their places until `release` is called with the same ops. Thread-safe; calls are counted.

    Args:
        ops: Canonical op names.
        wrap: Makes the wrapper of an op; always the same function.
    """
    with _lock:
        count = _needed.get(ops, 0)
        if not count:
            _seen.add(ops)
            if not _needed:
                for batch in _batches_beside():
                    batch.replace()
            for batch in _batches_of_no_other(ops, frozenset(_needed)):
                batch.replace(wrap)
        _needed[ops] = count + 1
        _held.ops.append((ops, wrap))


def release(ops: frozenset[str]) -> None:
    """Take back one `acquire`; the last one puts every name back. Thread-safe.

    Args:
        ops: As given to `acquire`.
    """
    with _lock:
        _forget_held(ops)
        count = _needed[ops] - 1
        if count:
            _needed[ops] = count
            return
        del _needed[ops]
        for batch in _batches_of_no_other(ops, frozenset(_needed)):
            batch.put_back()
        if not _needed:
            for batch in _batches_beside():
                batch.put_back()


def _forget_held(ops: frozenset[str]) -> None:
    # A region may be left in another thread than the one that entered it, by those who call these by hand.
    found = next((entry for entry in reversed(_held.ops) if entry[0] is ops), None)
    if found is not None:
        _held.ops.remove(found)


def _after_fork() -> None:
    """Begin anew in a child process: of the threads of its parent, and their regions, this one alone is left."""
    global _lock  # noqa: PLW0603 - another thread may have held it, and is not there to let it go
    _lock = threading.RLock()
    held, _held.ops = _held.ops, []
    everywhere = {place for ops in _seen for op in ops for place in places(op)} | {*_beside}
    for place in everywhere:
        if place.replacement is not None:
            _put_back_one(place)
    _needed.clear()
    for ops, wrap in held:
        acquire(ops, wrap)


os.register_at_fork(after_in_child=_after_fork)


class _Batch:
    """Places of one holder, replaced together: a region is opened in every step of a loop.

    Args:
        holder: A module or class.
        chosen: Places in it.
    """

    def __init__(self, holder: Any, chosen: tuple[Place, ...]) -> None:
        self._holder, self._places = holder, chosen
        self._current = itemgetter(*(place.name for place in chosen), chosen[0].name)  # of two names at least: a tuple
        self._built = -1
        self._originals: dict[str, Any] = {}
        self._replacements: dict[str, Any] = {}
        self._expected: tuple[tuple[Any, ...], ...] = ()

    def replace(self, wrap: Wrap | None = None) -> None:
        """Put the wrappers there."""
        if self._holds(original=True):
            self._set(self._replacements)
        else:
            for place in self._places:
                _replace_one(place, wrap)

    def put_back(self) -> None:
        """Put there what was there before; what somebody else has put there meanwhile is left."""
        if self._holds(original=False):
            self._set(self._originals)
        else:
            for place in self._places:
                _put_back_one(place)

    def _holds(self, *, original: bool) -> bool:
        if self._built != _made[0]:
            self._build()
        # Functions are equal only to themselves.
        found: tuple[Any, ...] = self._current(vars(self._holder))
        return found == self._expected[original]

    def _set(self, values: dict[str, Any]) -> None:
        if isinstance(self._holder, type):
            for name, value in values.items():
                setattr(self._holder, name, value)
        else:
            vars(self._holder).update(values)

    def _build(self) -> None:
        self._built = _made[0]
        self._originals = {place.name: place.original for place in self._places}
        self._replacements = {place.name: place.replacement for place in self._places}
        ends = self._places[0].name
        self._expected = tuple((*values.values(), values[ends]) for values in (self._replacements, self._originals))


_made = [0]
"""How many wrappers were made so far: what a batch has written down is of no use after another one."""


def _replace_one(place: Place, wrap: Wrap | None) -> None:
    found = place.namespace[place.name]
    # Somebody else may have put something there since: that is called from the wrapper, and comes back at the end.
    if found is not place.original and found is not place.replacement:
        make = wrap or _beside[place]
        place.original, place.replacement = found, make(place.label, found)
        _made[0] += 1
    setattr(place.holder, place.name, place.replacement)


def _put_back_one(place: Place) -> None:
    if place.namespace[place.name] is place.replacement:
        setattr(place.holder, place.name, place.original)


@lru_cache(maxsize=64)
def _batches_of_no_other(ops: frozenset[str], others: frozenset[frozenset[str]]) -> tuple[_Batch, ...]:
    shared = {place for other in others for op in other for place in places(op)}
    return _batches(place for op in sorted(ops) for place in places(op) if place not in shared)


@cache
def _batches_beside() -> tuple[_Batch, ...]:
    return _batches(_beside)


def _batches(chosen: Iterable[Place]) -> tuple[_Batch, ...]:
    by_holder: dict[Any, list[Place]] = {}
    for place in chosen:
        by_holder.setdefault(place.holder, []).append(place)
    return tuple(_Batch(holder, tuple(found)) for holder, found in by_holder.items())


def open_regions() -> int:
    """Count the regions that are open in the process."""
    return sum(_needed.values())


def changed_names() -> list[str]:
    """Name the attributes of TensorPlay that are replaced now; none outside of regions.

    Returns:
        Names such as ``"tensorplay._C.mm"``, sorted.
    """
    with _lock:
        found = {place for ops in _needed for op in ops for place in places(op)}
        found.update(_beside if _needed else ())
        return sorted(str(place) for place in found if place.namespace[place.name] is place.replacement)
