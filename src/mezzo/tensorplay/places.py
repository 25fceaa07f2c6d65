"""The places where an op of TensorPlay is called: attributes of its extension module, its tensor and some other modules.

Each public function ends in ``tensorplay._C.<op>`` or a method of ``tensorplay.Tensor``, looked up at the call. Some modules
hold a function of ``_C`` under a name of their own, and a few functions do in Python what an op of their name would.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from functools import cache
from typing import Any

import tensorplay
import tensorplay.linalg
import tensorplay.nn.functional
import tensorplay.quantization
from tensorplay import Tensor

from mezzo.tensorplay.ops import FRAMEWORK
from mezzo.vocabulary import vocabulary

__all__ = ["Place", "places"]

# The operators of Python, which are methods of their own and do not go through the method of the op.
_OPERATORS = {
    "matmul": "__matmul__ __rmatmul__ __imatmul__",
    "add": "__add__ __radd__",
    "sub": "__sub__",
    "rsub": "__rsub__",
    "mul": "__mul__ __rmul__",
    "div": "__truediv__ __rtruediv__",
    "floor_divide": "__floordiv__ __rfloordiv__",
    "remainder": "__mod__ __rmod__",
    "pow": "__pow__ __rpow__",
    "neg": "__neg__",
    "abs": "__abs__",
    "add_": "__iadd__",
    "sub_": "__isub__",
    "mul_": "__imul__",
    "div_": "__itruediv__",
    "floor_divide_": "__ifloordiv__",
    "remainder_": "__imod__",
    "eq": "__eq__",
    "ne": "__ne__",
    "lt": "__lt__",
    "le": "__le__",
    "gt": "__gt__",
    "ge": "__ge__",
    "index": "__getitem__",
    "index_put_": "__setitem__",
}


class Place:
    """An attribute that holds an op.

    Args:
        holder: A module or class.
        name: The attribute's name.
        label: What it is to be replaced for: an op's name.
    """

    __slots__ = ("holder", "label", "name", "namespace", "original", "replacement")

    def __init__(self, holder: Any, name: str, label: str) -> None:
        self.holder, self.name, self.label = holder, name, label
        self.namespace = vars(holder)
        self.original: Any = None
        self.replacement: Any = None

    def __str__(self) -> str:
        owner = "tensorplay.Tensor" if self.holder is Tensor else self.holder.__name__
        return f"{owner}.{self.name}"


_found: dict[str, tuple[Place, ...]] = {}
_finding = threading.RLock()


def places(op: str) -> tuple[Place, ...]:
    """Find every attribute through which an op is called.

    Args:
        op: A canonical op name.

    Returns:
        Places; none for an op that Python cannot call by its name.

    Example:
        >>> [str(place) for place in places("matmul")][:2]
        ['tensorplay._C.matmul', 'tensorplay.Tensor.matmul']
    """
    known = _found.get(op)
    if known is None:
        # A place is told by what it is, not by what it says, so there must be one alone, whoever asks first.
        with _finding:
            if op not in _found:
                _found[op] = _find(op)
            known = _found[op]
    return known


def _after_fork() -> None:
    """Begin with a new lock in a child process: who held the old one is not there."""
    global _finding  # noqa: PLW0603 - as above
    _finding = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _find(op: str) -> tuple[Place, ...]:
    found = [Place(tensorplay._C, op, op)] if op in vars(tensorplay._C) else []
    names = (op, *_OPERATORS.get(op, "").split())
    found += [Place(Tensor, name, op) for name in names if name in vars(Tensor)]
    return (*found, *_aliases().get(op, ()), *_compositions(op))


def _compositions(op: str) -> list[Place]:
    """Find the public functions that do in Python what the op of their name does, and do not call it.

    Those of ``tensorplay.linalg`` look at dtypes before they call anything, and refuse what a region would have cast.
    """
    aliases = vocabulary(FRAMEWORK).aliases
    found = [Place(tensorplay.nn.functional, "cross_entropy", op)] if op == "cross_entropy_loss" else []
    for spelling, prefix, module in _FUNCTIONS:
        name = op.removeprefix(prefix)
        function = vars(module).get(name) if op.startswith(prefix) else None
        checks = module is tensorplay.linalg and inspect.isfunction(function)
        alias = aliases.get(spelling + name)
        composed = alias is not None and not alias.ops
        if function is not None and name not in _REFUSING_LOW and (checks or composed):
            found.append(Place(module, name, op))
    return found


_REFUSING_LOW = frozenset(("matrix_power",))
"""Functions of which a part is to run in lower precision, and which refuse inputs that are: their parts have rules."""

_FUNCTIONS = (
    ("F.", "", tensorplay.nn.functional),
    ("tensorplay.", "", tensorplay),
    ("linalg.", "linalg_", tensorplay.linalg),
)


@cache
def _aliases() -> dict[str, list[Place]]:
    """Find the modules that hold a function of ``_C`` itself, taken when they were imported.

    TensorPlay imports some of its modules when they are first used; those that take functions so are imported above, or a
    region that was open then would leave its wrappers with them.
    """
    ops = {id(value): name for name, value in vars(tensorplay._C).items() if callable(value)}
    found: dict[str, list[Place]] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "tensorplay" or module is None or module is tensorplay._C:
            continue
        for attribute, value in list(vars(module).items()):
            if (op := ops.get(id(value))) is not None:
                found.setdefault(op, []).append(Place(module, attribute, op))
    return found
