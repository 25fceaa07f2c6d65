"""How much is kept from the forward pass for the backward pass, with autocast and without. Nothing is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import dtypes
from jax import numpy as jnp

from mezzo.report import Residuals

from .internals import Literal

__all__ = ["bytes_kept", "compare"]

Function = Callable[..., Sequence[Any]]


def compare(plain: Function, lowered: Function, arguments: Sequence[Any], constants: Collection[int] = ()) -> Residuals:
    """Compare what two versions of a function keep for the backward pass.

    Args:
        plain: The function as it is: takes arrays, gives a list of arrays.
        lowered: The function under autocast.
        arguments: Arrays, or abstract values of them.
        constants: The places of those by which it is not differentiated, whatever their dtype.

    Returns:
        The bytes of both, or why they are not known.

    Example:
        >>> def lowered(x):
        ...     return [jnp.sin(x.astype(jnp.bfloat16)).astype(jnp.float32)]
        >>> compare(lambda x: [jnp.sin(x)], lowered, [jax.ShapeDtypeStruct((10,), jnp.float32)])
        Residuals(plain=40, autocast=20, reason='')
    """
    chosen = [place for place, one in enumerate(arguments) if place not in constants and _is_float(one)]
    if not chosen:
        return Residuals(None, None, "there is no float array among the arguments")
    try:
        return Residuals(bytes_kept(plain, arguments, chosen), bytes_kept(lowered, arguments, chosen))
    except NameError:
        return Residuals(None, None, "it uses the names of axes of a transformation around it, such as jax.shard_map")
    # What cannot be differentiated says so with whatever error its author chose.
    except Exception as error:  # noqa: BLE001
        return Residuals(None, None, f"it cannot be differentiated ({_first_line(error)})")


def bytes_kept(function: Function, arguments: Sequence[Any], places: Sequence[int]) -> int:
    """Count the bytes that ``jax.vjp`` keeps of a function for its backward pass.

    Args:
        function: Takes arrays, gives a list of arrays.
        arguments: Arrays, or abstract values of them.
        places: By which of them it is differentiated.

    Returns:
        The bytes of the arrays that the returned VJP function holds, each counted once. A loop keeps what it needs of each
        step, so that counts as often as it runs. Arguments that are kept are among them.

    Example:
        >>> bytes_kept(lambda x: [jnp.sin(x)], [jax.ShapeDtypeStruct((10,), jnp.float32)], [0])  # the cosine
        40
    """

    def kept(*arrays: Any) -> list[Any]:
        results, backward = _vjp(function, arrays, places)
        # A while loop, for one, says only here that it has no backward pass.
        backward([_cotangent(result) for result in results])
        return jax.tree.leaves(backward)

    results = jax.make_jaxpr(kept)(*arguments).jaxpr.outvars
    different = {id(atom) if isinstance(atom, Literal) else atom: atom.aval for atom in results}
    return sum(_bytes(aval) for aval in different.values())


def _vjp(function: Function, arrays: Sequence[Any], places: Sequence[int]) -> tuple[Sequence[Any], Any]:
    def of_chosen(*chosen: Any) -> Sequence[Any]:
        filled = list(arrays)
        for place, array in zip(places, chosen, strict=True):
            filled[place] = array
        return function(*filled)

    found: tuple[Sequence[Any], Any] = jax.vjp(of_chosen, *(arrays[place] for place in places))
    return found


def _cotangent(result: Any) -> Any:
    if jnp.issubdtype(jnp.result_type(result), jnp.inexact):
        return jnp.ones_like(result)
    return np.zeros(jnp.shape(result), dtypes.float0)


def _is_float(argument: Any) -> bool:
    return hasattr(argument, "dtype") and bool(jnp.issubdtype(argument.dtype, jnp.floating))


def _bytes(aval: Any) -> int:
    if not hasattr(aval, "dtype") or jnp.issubdtype(aval.dtype, dtypes.extended):
        return 0
    sizes = [size if isinstance(size, int) else 1 for size in aval.shape]
    return math.prod(sizes) * int(aval.dtype.itemsize)


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__
