"""What goes into a traced function and comes out of it: arrays are traced, all else stays as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from mezzo.errors import ArrayTypeError, MutationError

from .argument_names import place_in_words, signature_of
from .internals import ClosedJaxpr

__all__ = ["Arguments", "Traced", "split_arguments", "trace"]

_NO_NUMBERS = "OUSMmV"
"""The kinds of NumPy's dtypes that JAX cannot compute with."""

_FOREIGN = ("torch", "tensorplay", "tensorflow", "paddle", "mlx")


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, taken apart.

    Attributes:
        leaves: All leaves of the arguments.
        tree: Their structure.
        places: Which leaves are arrays.
    """

    leaves: Sequence[Any]
    tree: Any
    places: Sequence[int]

    @property
    def arrays(self) -> list[Any]:
        """The arrays among the leaves."""
        return [self.leaves[place] for place in self.places]

    def filled(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the arguments with other arrays in the place of theirs."""
        leaves = list(self.leaves)
        for place, array in zip(self.places, arrays, strict=True):
            leaves[place] = array
        positional, named = jax.tree.unflatten(self.tree, leaves)
        return positional, named


def split_arguments(positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
    """Take the arguments of a call apart.

    Arrays are `jax.Array`, tracers, and NumPy's arrays and scalars. Python's numbers, strings and functions are not: they
    stay what they are, as the leaves of Equinox's modules need it.

    Args:
        positional: Positional arguments.
        named: Keyword arguments.

    Returns:
        Their leaves.

    Raises:
        ArrayTypeError: A leaf is an array of another framework, or only the shape of one.
    """
    leaves, tree = jax.tree.flatten((positional, named))
    leaves = [_as_array(leaf) for leaf in leaves]
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray | np.generic)]
    arrays = set(places)
    for place, leaf in enumerate(leaves):
        if place not in arrays:
            _refuse_foreign(leaf, tree, place)
    for place in places:
        _refuse_object(leaves[place], tree, place)
    return Arguments(leaves, tree, places)


def _as_array(leaf: Any) -> Any:
    """Make an array JAX's own, in the dtype that JAX has for it; a wrapper gives the array that it stands for."""
    if isinstance(leaf, jax.Array):
        return leaf
    if callable(getattr(type(leaf), "__jax_array__", None)):
        return leaf.__jax_array__()
    is_numpy = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in _NO_NUMBERS
    return jnp.asarray(leaf) if is_numpy else leaf


def _refuse_foreign(leaf: Any, tree: Any, place: int) -> None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        msg = (
            f"{place_in_words(tree, place)} is a ShapeDtypeStruct, and autocast takes arrays. To look at shapes and dtypes: "
            "jax.eval_shape(autocast(fn), ...), jax.jit(autocast(fn)).lower(...), or mezzo.jax.explain(fn)(...)."
        )
        raise ArrayTypeError(msg)
    kind = type(leaf)
    if kind.__module__.split(".")[0] in _FOREIGN and hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        msg = (
            f"{place_in_words(tree, place)} is a {kind.__module__.split('.')[0]}.{kind.__name__}, and autocast takes JAX's "
            "and NumPy's arrays. Convert it: jnp.asarray(x)."
        )
        raise ArrayTypeError(msg)


def _refuse_object(leaf: Any, tree: Any, place: int) -> None:
    if not isinstance(leaf, jax.Array) and leaf.dtype.kind in _NO_NUMBERS:
        msg = f"{place_in_words(tree, place)} is a NumPy array of {leaf.dtype}, which JAX cannot compute with; pass numbers."
        raise ArrayTypeError(msg)


# Tracing


@dataclass(frozen=True)
class Traced:
    """A function as traced.

    Attributes:
        closed: The program.
        tree: The structure of what it returns.
    """

    closed: ClosedJaxpr
    tree: Any


def trace(fn: Callable[..., Any], arguments: Arguments, name: str) -> Traced:
    """Trace a function at the dtypes that its arguments have.

    Args:
        fn: The function.
        arguments: Its arguments, taken apart.
        name: Its name, for messages.

    Returns:
        The program and the structure of its results.

    Raises:
        MutationError: The function changed the state of a Flax NNX object that it was given, or that it closes over.
        ArrayTypeError: It returned something that is no array.
    """
    tree: Any = None

    def flat(*arrays: Any) -> list[Any]:
        nonlocal tree
        positional, named = arguments.filled(arrays)
        before = _nnx_state((positional, named))
        result = fn(*positional, **named)
        _refuse_mutation(before, _nnx_state((positional, named)), name)
        leaves, tree = jax.tree.flatten(result)
        _refuse_results(leaves, tree, name)
        return leaves

    # So that errors of JAX name the function and its arguments, and not this one.
    flat.__wrapped__ = fn  # type: ignore[attr-defined]
    flat.__signature__ = signature_of(fn, arguments.tree, arguments.places)  # type: ignore[attr-defined]
    try:
        closed = jax.make_jaxpr(flat)(*arguments.arrays)
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            raise MutationError(_mutation(name, "closes over")) from error
        raise
    return Traced(closed, tree)


def _refuse_results(leaves: Sequence[Any], tree: Any, name: str) -> None:
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            continue
        paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
        where = jax.tree_util.keystr(paths[place][0])
        msg = (
            f"{name} returned a {type(leaf).__name__} (result{where}), and autocast, like jax.jit, returns arrays only. "
            "Return arrays, or bring the rest out of the function in another way."
        )
        raise ArrayTypeError(msg)


# Flax NNX


def _nnx_state(tree: Any) -> list[tuple[Any, Any]]:
    """Give the variables of the NNX modules among the arguments, each with the array that it holds.

    Not those of an `nnx.State`: it is merged into a module in the function, which is the way to do it.
    """
    flax = sys.modules.get("flax.nnx")
    if flax is None:
        return []
    modules = [
        node
        for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, flax.Module | flax.State))
        if isinstance(node, flax.Module)
    ]
    nodes = [node for module in modules for _, node in flax.iter_graph(module)]
    return [(node, node.get_value()) for node in nodes if isinstance(node, flax.Variable)]


def _refuse_mutation(before: list[tuple[Any, Any]], after: list[tuple[Any, Any]], name: str) -> None:
    same = len(before) == len(after) and all(
        old is new and was is now for (old, was), (new, now) in zip(before, after, strict=True)
    )
    if not same:
        raise MutationError(_mutation(name, "was given"))


def _mutation(name: str, how: str) -> str:
    return (
        f"{name} changed the state of a Flax NNX module that it {how}, as BatchNorm and Dropout do; in a traced function "
        "the change would be lost. Pass the state and return it. Outside: graph, params, rest = nnx.split(model, nnx.Param, "
        "...). In the function: model = nnx.merge(graph, params, rest, copy=True), and return nnx.state(model, "
        "nnx.Not(nnx.Param)) beside the loss (has_aux=True). Outside again: nnx.update(model, params, rest)."
    )
