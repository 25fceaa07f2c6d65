"""`GradCheck`: whether gradients hold Inf or NaN, known on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mezzo.errors import ScalingError

__all__ = ["CheckLike", "GradCheck"]

Flag = jax.Array | np.bool_


@functools.partial(jax.tree_util.register_dataclass, data_fields=["inf", "nan"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class GradCheck:
    """What a look at gradients found. An immutable pytree: it goes through `jax.jit`, `jax.vmap` and `jax.lax.scan`.

    Attributes:
        inf: bool of no dimension: whether any element is Inf.
        nan: bool of no dimension: whether any element is NaN.

    Example:
        >>> import jax.numpy as jnp
        >>> check = GradCheck.of({"weight": jnp.array([1.0, jnp.nan]), "bias": jnp.zeros(2)})
        >>> bool(check.inf), bool(check.nan), bool(check.finite)
        (False, True, False)
    """

    inf: Flag
    nan: Flag

    @property
    def finite(self) -> Flag:
        """Whether there is neither Inf nor NaN: bool of no dimension."""
        # Operators, not jnp: the flags of a disabled scaler are NumPy's, and stay so, which costs no equation.
        return ~(self.inf | self.nan)

    @classmethod
    def of(cls, grads: Any, axis_name: Hashable | None = None) -> GradCheck:
        """Look at gradients.

        Args:
            grads: A pytree. Arrays of float and complex dtypes are looked at, in any precision; all else is passed over.
            axis_name: A name, or a tuple of names, of mapped axes (`jax.shard_map`, `jax.pmap`, `jax.vmap`). What one
                member of the axis found, all of them report. None agrees with nobody.

        Returns:
            The verdict. Nothing is read by the host.

        Example:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> shards = jnp.array([[1.0, 2.0], [3.0, jnp.inf]])
            >>> jax.vmap(lambda shard: GradCheck.of(shard, "shards").finite, axis_name="shards")(shards)
            Array([False, False], dtype=bool)
        """
        return look(lambda grads: grads, grads, axis_name)


CheckLike = GradCheck | jax.Array | bool
"""A verdict: what a look found, or whether all was finite."""


def look(made: Callable[[Any], Any], source: Any, axis_name: Hashable | None) -> GradCheck:
    """Look at what is made of a pytree, without keeping it.

    Args:
        made: A function of a list of arrays, such as `GradScaler.unscale`. It is computed where it is looked at.
        source: The pytree whose float and complex leaves it is given.
        axis_name: As in `GradCheck.of`.

    Returns:
        The verdict.
    """
    seen = _inexact_leaves(source)
    finite = _all_finite(made(seen))
    # One pass over the gradients of a good step. What is wrong is asked only where something is.
    inf, nan = lax.cond(finite, lambda _: (~finite, ~finite), lambda seen: _what_is_wrong(made(seen)), seen)
    if axis_name is None:
        return GradCheck(inf, nan)
    return GradCheck(_agreed(inf, axis_name), _agreed(nan, axis_name))


def is_inexact(leaf: Any) -> bool:
    """Say whether a leaf of a pytree is an array, or a number, of a float or complex dtype."""
    # The gradient of an integer has the dtype float0, which is a struct to NumPy; keys have a dtype of JAX's own.
    return isinstance(leaf, float | complex) or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact))


def finite_in(check: Any) -> Any:
    """Give the flag in a `GradCheck`, or the flag itself where a bool came.

    Raises:
        ScalingError: It is something else.
    """
    if isinstance(check, GradCheck):
        return check.finite
    dtype = jnp.dtype(bool) if isinstance(check, bool) else getattr(check, "dtype", None)
    if dtype != jnp.dtype(bool) or jnp.shape(check) != ():
        came = f"an array of {dtype} with shape {jnp.shape(check)}" if dtype is not None else type(check).__name__
        msg = (
            f"A verdict is a GradCheck, or a bool of no dimension that says whether all was finite; got {came}. "
            "GradCheck.of(grads) makes one."
        )
        raise ScalingError(msg)
    return check


def _inexact_leaves(tree: Any) -> list[Any]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


def _all_finite(leaves: list[Any]) -> jax.Array:
    return functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(leaf)) for leaf in leaves], jnp.ones((), bool))


def _what_is_wrong(leaves: list[Any]) -> tuple[jax.Array, jax.Array]:
    return _any(jnp.isinf, leaves), _any(jnp.isnan, leaves)


def _any(test: Any, leaves: list[Any]) -> jax.Array:
    return functools.reduce(jnp.logical_or, [jnp.any(test(leaf)) for leaf in leaves], jnp.zeros((), bool))


def _agreed(flag: Flag, axis_name: Hashable) -> jax.Array:
    # Collectives take numbers only.
    agreed: jax.Array = lax.pmax(jnp.asarray(flag, jnp.int32), axis_name) > 0
    return agreed
