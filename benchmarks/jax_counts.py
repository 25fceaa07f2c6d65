"""What a program says of itself before it runs: the bytes kept for the backward pass, its casts, its products."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import jax
from jax._src.core import jaxprs_in_params  # public since JAX 0.10
from jax.extend import core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PRODUCTS = ("dot_general", "conv_general_dilated")


def residual_bytes(loss: Callable[..., Any], parameters: Any, *data: Any) -> int:
    """Bytes of what ``jax.vjp`` keeps, the parameters' own among them; nothing is computed."""
    kept = jax.eval_shape(lambda given: jax.vjp(lambda inner: loss(inner, *data), given)[1], parameters)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Those whose results are used, those of inner programs once each, however often they run."""
    for equation in _used(jaxpr):
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def _used(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """Differentiation leaves equations behind that no output needs, and compilers drop them."""
    needed = {each for each in jaxpr.outvars if isinstance(each, core.Var)}
    found = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            found.append(equation)
            needed.update(each for each in equation.invars if isinstance(each, core.Var))
    return found[::-1]


def count(jaxpr: core.Jaxpr) -> dict[str, int]:
    """Equations, casts between floats of different width, and products by what they multiply."""
    found = Counter(equations=0, converts=0, low_products=0, products=0)
    for equation in equations(jaxpr):
        found["equations"] += 1
        found["converts"] += equation.primitive.name == "convert_element_type" and _is_cast(equation)
        if equation.primitive.name in _PRODUCTS:
            found["products"] += 1
            found["low_products"] += all(each.aval.dtype.itemsize == 2 for each in equation.invars)
    return dict(found)


def _is_cast(equation: core.JaxprEqn) -> bool:
    (given,), (made,) = equation.invars, equation.outvars
    floats = all(jax.numpy.issubdtype(each.aval.dtype, jax.numpy.floating) for each in (given, made))
    return floats and given.aval.dtype != made.aval.dtype
