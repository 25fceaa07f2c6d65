"""What the tests of nets share: a net with its results in float32, and the checks of values, gradients and dots.

Errors are stated in units of the low dtype's rounding: 2**-8 for bfloat16, 2**-11 for float16. One number then serves both
dtypes: a net that rounds k times in a row is off by about k units, whichever dtype rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import jaxprs_in_params  # public since JAX 0.10

from mezzo.jax import autocast

LOW_DTYPES = ("bfloat16", "float16")
DOTS = {"dot_general", "conv_general_dilated", "ragged_dot_general"}


def unit(dtype: str) -> float:
    """Give the largest relative error of one rounding to a dtype."""
    return float(jnp.finfo(dtype).eps) / 2


class Draw:
    """Draw float32 arrays, always the same ones for a seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float | None = None) -> jax.Array:
        """Draw normal numbers; by default as weights are drawn: divided by the root of the inputs of a unit."""
        factor = scale if scale is not None else float(np.prod(shape[:-1])) ** -0.5
        return jnp.asarray(self._random.normal(size=shape) * factor, jnp.float32)

    def fill(self, shapes: Any) -> Any:
        """Draw the parameters of a library's net from their shapes: what its own start does, without compiling it."""
        return jax.tree_util.tree_map_with_path(self._leaf, shapes)

    def _leaf(self, path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        if "var" in name:
            return jnp.ones(leaf.shape)
        if "mean" in name:
            return jnp.zeros(leaf.shape)
        near_one = "scale" in name
        return self(*leaf.shape, scale=0.1 if leaf.ndim < 2 else None) + (1.0 if near_one else 0.0)


class Case:
    """A net: `loss(params, *data)` gives a float32 loss and any pytree of outputs.

    What plain JAX makes of it in float32, and autocast with given options, is computed once for all the tests of the net.
    """

    def __init__(self, loss: Callable[..., tuple[jax.Array, Any]], params: Any, *data: Any) -> None:
        self.loss, self.args = loss, (params, *data)
        self._ran: dict[str, tuple[Any, Any]] = {}

    @cached_property
    def traced(self) -> Any:
        return trace(jax.value_and_grad(self.loss, has_aux=True), *self.args)

    @cached_property
    def expected(self) -> Any:
        """The results in float32: ((loss, outputs), gradients)."""
        return compute(self.traced, *self.args)

    @property
    def dots(self) -> int:
        """How many dots the forward and backward pass have."""
        return dots(self.traced.jaxpr).total()

    def under_autocast(self, dtype: str, **options: Any) -> tuple[Any, Any]:
        """Give the results under autocast, and the jaxpr of the forward and backward pass which computed them."""
        key = f"{dtype} {options}"
        if key not in self._ran:
            self._ran[key] = run(jax.value_and_grad(autocast(self.loss, dtype, **options), has_aux=True), *self.args)
        return self._ran[key]


def run(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Give what `jit` of a function gives, and the jaxpr of it."""
    traced = trace(fn, *args)
    return compute(traced, *args), traced.jaxpr


def trace(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(fn).trace(*args)


def compute(traced: Any, *args: Any) -> Any:
    # Nets as small as these run in no time, and to compile them takes seconds: LLVM is not to optimise them too.
    return traced.lower().compile(compiler_options={"xla_backend_optimization_level": 0})(*args)


def check(case: Case, dtype: str, *, value: float, gradient: float, high: int = 0, **options: Any) -> Any:
    """Compare a net under autocast with float32, and see that its dots ran low.

    Args:
        case: The net.
        dtype: The low dtype.
        value: How many units of `dtype` the loss and each output may be off, relative to the norm of each.
        gradient: The same for each gradient.
        high: How many dots of the forward and backward pass stay float32, for example in an opaque rule.
        **options: Passed to autocast.

    Returns:
        The results, ((loss, outputs), gradients).
    """
    got, jaxpr = case.under_autocast(dtype, **options)
    check_dots(jaxpr, dtype, total=case.dots, high=high)
    check_close(got[0], case.expected[0], value * unit(dtype))
    check_close(got[1], case.expected[1], gradient * unit(dtype))
    assert not same_bits(got[1], case.expected[1]), "the gradients are those of float32, bit for bit: nothing was cast"
    return got


def check_close(got: Any, want: Any, limit: float) -> None:
    """See that two pytrees agree: structure, shapes, dtypes, where they are finite, and each leaf within `limit` in norm.

    A leaf whose norm is below 1% of the whole is measured against that 1%: the true gradient of a bias in front of a batch
    norm is zero, and every relative error of it is large.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    whole = norm_of_all(want)
    wrong = {}
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype, path
        assert one.shape == other.shape, path
        error = relative_error(one, other, floor=0.01 * whole)
        if not error <= limit:
            wrong[jax.tree_util.keystr(path)] = error
    assert not wrong, f"relative errors above {limit:.2g}: {wrong}"


def relative_error(got: Any, want: Any, *, floor: float = 0.0) -> float:
    """Give the norm of the difference, relative to the norm of `want`; inf where one is finite and the other is not."""
    one, other = np.asarray(bits(got), np.float64), np.asarray(bits(want), np.float64)
    finite = np.isfinite(other)
    if not np.array_equal(np.isfinite(one), finite):
        return float("inf")
    one, other = one[finite], other[finite]
    return float(np.linalg.norm(one - other) / max(np.linalg.norm(other), floor, 1e-30))


def bits(leaf: jax.Array) -> jax.Array:
    """Give an array itself, and of a PRNG key the integers in it."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def norm_of_all(tree: Any) -> float:
    leaves = [np.asarray(bits(leaf), np.float64) for leaf in jax.tree.leaves(tree)]
    return float(np.sqrt(sum(np.sum(np.where(np.isfinite(leaf), leaf, 0.0) ** 2) for leaf in leaves)))


def same_bits(one: Any, other: Any) -> bool:
    return all(
        np.array_equal(bits(a), bits(b)) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """Give every equation of a jaxpr, with those of the jaxprs inside."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def dots(jaxpr: Any) -> Counter[tuple[str, str, str]]:
    """Count dots and convolutions by the dtypes of their two operands and their result."""
    return Counter(
        (str(eqn.invars[0].aval.dtype), str(eqn.invars[1].aval.dtype), str(eqn.outvars[0].aval.dtype))
        for eqn in equations(jaxpr)
        if eqn.primitive.name in DOTS
    )


def check_dots(jaxpr: Any, dtype: str, *, total: int, high: int = 0) -> None:
    """See that all dots but `high` of them have operands and results of the low dtype, and that none was lost."""
    assert total > high, "a test of a net needs a dot that runs low"
    want = Counter({(dtype,) * 3: total - high, ("float32",) * 3: high})
    assert dots(jaxpr) == +want


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy, as written by hand: log_softmax and the label's entry."""
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, labels[:, None], axis=-1).mean()
