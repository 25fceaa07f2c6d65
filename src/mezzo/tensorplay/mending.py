"""Repairs: calls that TensorPlay would fail over dtypes, or compute wrongly without a word, are made in wider dtypes.

Which ops need it is data (``tables/tensorplay/repairs.csv``), found by running each of them. There are three cures: inputs
are widened beforehand, where a mixed call gives wrong numbers or where there is no kernel for a lower-precision dtype; a
call that raises is made again in the widest of its inputs' dtypes; and what is written into a tensor takes its dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any

import tensorplay

from mezzo.decision import CastPolicy, input_dtypes
from mezzo.tensorplay.actions import Cast, each, rebuilt
from mezzo.tensorplay.casting import cast, hook_for
from mezzo.tensorplay.current import Action
from mezzo.tensorplay.dtypes import (
    DTYPE_SETS,
    FLOAT32,
    KIND,
    LOW,
    SEQUENCE,
    TENSOR,
    dtypes_in,
    float_bits,
    floats,
    named_dtype,
)

__all__ = ["as_called", "into_destination", "made_again", "widened_first"]

_RAISED = (RuntimeError, TypeError, ValueError)
_PLAIN = frozenset((*_RAISED, NotImplementedError))
_SPEAKS_OF_DTYPES = re.compile("type|kernel|implement|support|float|half|double", re.IGNORECASE)


def _is_over_dtypes(error: Exception) -> bool:
    """Say whether an error of TensorPlay's may be over dtypes; not so those by which hooks stop a replayed forward pass."""
    return type(error) in _PLAIN and _SPEAKS_OF_DTYPES.search(str(error)) is not None


def as_called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call as it came: the action of an op that has no rule but may need a repair."""
    return function(*args, **kwargs)


def widened_first(action: Action, rule: CastPolicy, low: str, lacks: frozenset[str], *, mixed: bool) -> Action:
    """Widen the inputs of calls that must not reach the op as the rule would have them.

    Args:
        action: What is done with other calls.
        rule: The cast policy that the action follows.
        low: The region's dtype, by name.
        lacks: The lower-precision dtypes for which the op has no kernel.
        mixed: Whether the op must not be reached by several floating dtypes.

    Returns:
        An action. Where it widens, the op runs in float32, or in float64 if one of its inputs has it.
    """

    def is_to_widen(found: frozenset[str]) -> bool:
        reach = set(input_dtypes(rule, sorted(found), low))
        return not reach.isdisjoint(lacks) or (mixed and len(reach) > 1)

    to_widen = tuple(is_to_widen(found) for found in DTYPE_SETS)
    as_it_comes = rule is CastPolicy.FALLTHROUGH and mixed

    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs and kwargs.get("out") is not None:
            return action(function, args, kwargs)
        if as_it_comes and not kwargs and (narrow := _beside_float32(args)):
            wide = list(args)
            for index in narrow:
                wide[index] = cast(args[index], FLOAT32)
            return function(*wide)
        bits = float_bits(args)
        if kwargs:
            bits |= float_bits(kwargs.values())
        if to_widen[bits]:
            return _widened(function, args, kwargs, DTYPE_SETS[bits])
        return action(function, args, kwargs)

    return act


def _beside_float32(args: tuple[Any, ...]) -> list[int] | None:
    """Find the 16-bit tensors of a call whose other tensors are in float32, the usual mixture; None if it is not that.

    The size of a tensor's elements is asked for in a third of the time that its dtype takes.
    """
    narrow, wide = [], None
    for index, value in enumerate(args):
        kind = KIND[type(value)]
        if kind == TENSOR:
            size = value.element_size()
            if size == 2 and value.is_floating_point():
                narrow.append(index)
            elif size == 4:
                wide = value
            else:
                return None
        elif kind == SEQUENCE and float_bits(value):
            return None
    return narrow if wide is not None and wide.is_floating_point() else None


def made_again(action: Action) -> Action:
    """Make a call that raises again, in the widest dtype of its inputs, if that is another call.

    Args:
        action: What is done at first.

    Returns:
        An action. If the second call raises too, the error is the first one's.
    """

    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return action(function, args, kwargs)
        except _RAISED as error:
            found = dtypes_in(args, kwargs)
            if not _is_over_dtypes(error) or found <= {"float64"} or kwargs.get("out") is not None:
                raise
            with suppress(*_RAISED):
                return _widened(function, args, kwargs, found)
            raise

    return act


def into_destination(lacks: frozenset[str]) -> Action:
    """Cast what is written into a tensor to the dtype of that tensor: a mixed call raises, or writes garbage.

    Args:
        lacks: The lower-precision dtypes for which the op has no kernel. It is then run on a float32 copy, whose values are
            added to zeros, put there by ``masked_fill_``: autograd has that on record, and neither ``copy_`` nor ``zero_``.

    Returns:
        An action.
    """

    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = floats(args[:1])
        if not written:
            return function(*args, **kwargs)
        if written[0] in lacks:
            args_wide, kwargs_wide = each(_TO["float32"], args, kwargs)
            result = function(*args_wide, **kwargs_wide)
            everywhere = tensorplay.ones(args[0].shape, dtype=tensorplay.bool, device=args[0].device)
            return args[0].masked_fill_(everywhere, 0.0).add_(_TO[written[0]](result))
        if len(dtypes_in(args, kwargs)) < 2:
            return function(*args, **kwargs)
        rest, kwargs_cast = each(_TO[written[0]], args[1:], kwargs)
        return function(args[0], *rest, **kwargs_cast)

    return act


def _widened(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: Set[str]) -> Any:
    args_wide, kwargs_wide = each(_TO["float64" if "float64" in found else "float32"], args, kwargs)
    return function(*args_wide, **kwargs_wide)


def _to(target: Any) -> Cast:
    sources = [
        (dtype, hook_for(dtype)) for dtype in (*LOW.values(), FLOAT32, named_dtype("float64")) if dtype != target
    ]

    def change(value: Any) -> Any:
        kind = KIND[type(value)]
        if kind == TENSOR:
            dtype = value.dtype
            if dtype == target:
                return value
            for source, hook in sources:
                if dtype == source:
                    return cast(value, target, hook)
            return value
        if kind == SEQUENCE:
            return rebuilt(value, change)
        return value

    return change


_TO = {name: _to(named_dtype(name)) for name in ("float64", "float32", *LOW)}
