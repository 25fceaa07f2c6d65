"""What the tests of the JAX autocast look at: the equations of a traced function, and the distance of two results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import jaxprs_in_params  # public since JAX 0.10
from jax.extend.core import JaxprEqn

BF16 = ("bfloat16", "bfloat16", "bfloat16")
F16 = ("float16", "float16", "float16")
F32 = ("float32", "float32", "float32")

DOTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def equations(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[JaxprEqn]:
    """Trace a function and list its equations, those of inner jaxprs too."""
    return list(_walk(jax.make_jaxpr(fn)(*args, **kwargs).jaxpr))


def _walk(jaxpr: Any) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _walk(inner)


def dtypes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Name the dtypes of an equation's operands, then of its results."""
    return tuple(var.aval.dtype.name for var in (*eqn.invars, *eqn.outvars))


def dots(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Counter[tuple[str, ...]]:
    """Count the dots and convolutions by their dtypes."""
    return Counter(dtypes(eqn) for eqn in equations(fn, *args, **kwargs) if eqn.primitive.name in DOTS)


def of(name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[str, ...]]:
    """List the dtypes of a primitive's equations, in order."""
    return [dtypes(eqn) for eqn in equations(fn, *args, **kwargs) if eqn.primitive.name == name]


def signature(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Give the results' pytree with (shape, dtype, weak type) as leaves."""
    out = jax.eval_shape(fn, *args, **kwargs)
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name, leaf.weak_type), out)


def distance(got: Any, want: Any) -> float:
    """Give the largest relative distance (of norms) among the leaves of two pytrees of one structure."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(_apart(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)


def _apart(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-6))


def arrays(*shapes: tuple[int, ...], seed: int = 0) -> list[jax.Array]:
    """Make float32 arrays of normal numbers."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
