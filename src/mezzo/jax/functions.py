"""For what a rewrite cannot see: a cast to float32 that stays in the trace, and casts of arguments before it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from mezzo.errors import OptionError, near

from .internals import canonical_dtype
from .settings import low_dtype_name
from .values import FLOAT32, LOW, dtype_of, is_float

__all__ = ["cast_inputs", "upcast"]

P = ParamSpec("P")

_EXPONENT_BITS, _MANTISSA_BITS = 8, 23


def upcast(tree: Any) -> Any:
    """Cast to float32 in a way that `autocast` can see.

    In a traced function ``x.astype(jnp.float32)`` leaves nothing behind if x is float32 there, so that autocast cannot know
    that the code asked for float32. This leaves a rounding to all of float32's bits: nothing to the numbers, and
    autocast leaves it in float32. Outside of autocast it costs nothing that could be measured.

    Args:
        tree: Arrays, in any pytree. float32, bfloat16 and float16 arrays become float32; all else stays.

    Returns:
        The same tree.

    Example:
        >>> import jax.numpy as jnp
        >>> from mezzo.jax import autocast, upcast
        >>> @autocast(outputs="flow")
        ... def variance(x, w):
        ...     h = upcast(x @ w)
        ...     return h - 1.0  # without upcast it would be bfloat16
        >>> variance(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype
        dtype('float32')
    """

    def visible(leaf: Any) -> Any:
        if not is_float(dtype_of(leaf)):
            return leaf
        wide = lax.convert_element_type(leaf, FLOAT32)
        return lax.reduce_precision(wide, exponent_bits=_EXPONENT_BITS, mantissa_bits=_MANTISSA_BITS)

    return jax.tree.map(visible, tree)


def cast_inputs(
    fn: Callable[P, Any] | None = None, dtype: Any = "bfloat16", *, outputs: Literal["float32", "flow"] = "float32"
) -> Any:
    """Cast the float32 arrays among a function's arguments to lower precision before it is traced.

    For libraries that look at dtypes while they are traced, such as flash attention kernels that take bfloat16 only. Inside
    of `autocast` such casts are seen and honoured. Everything in ``fn`` then runs in the dtypes that this leads to, so it is
    for single functions, not for models.

    Args:
        fn: The function. Without it, a decorator is returned.
        dtype: ``"bfloat16"`` or ``"float16"``.
        outputs: ``"float32"`` casts results that are in ``dtype`` to float32, if an argument was cast; ``"flow"`` leaves
            them.

    Returns:
        A function with the same arguments.

    Raises:
        DtypeError: The dtype is not one of the two.
        OptionError: ``outputs`` is another word, or ``fn`` cannot be called.

    Example:
        >>> import jax.numpy as jnp
        >>> from mezzo.jax import cast_inputs
        >>> @cast_inputs(outputs="flow")
        ... def kernel(q, k):
        ...     return q @ k
        >>> kernel(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype
        dtype(bfloat16)
    """
    low = LOW[low_dtype_name(dtype)]
    if outputs not in ("float32", "flow"):
        msg = f"outputs={outputs!r} is not allowed; allowed are 'float32', 'flow'.{near(str(outputs), ['float32', 'flow'])}"
        raise OptionError(msg)
    if fn is None:
        return functools.partial(cast_inputs, dtype=dtype, outputs=outputs)
    if not callable(fn):
        msg = f"cast_inputs takes a function, got {type(fn).__name__}; to cast arrays, use their astype()."
        raise OptionError(msg)

    @functools.wraps(fn)
    def cast_first(*args: P.args, **kwargs: P.kwargs) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        given = [_is_wide(leaf) for leaf in leaves]
        leaves = [jnp.asarray(leaf, low) if wide else leaf for leaf, wide in zip(leaves, given, strict=True)]
        positional, named = jax.tree.unflatten(tree, leaves)
        result = fn(*positional, **named)
        if outputs == "flow" or not any(given):
            return result
        return jax.tree.map(lambda leaf: leaf.astype(FLOAT32) if dtype_of(leaf) == low else leaf, result)

    return cast_first


def _is_wide(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return False
    return bool(canonical_dtype(leaf.dtype) == FLOAT32)
