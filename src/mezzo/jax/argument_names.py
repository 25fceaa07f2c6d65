"""What to call an array among a function's arguments, in errors of mezzo's and of JAX's own."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

__all__ = ["place_in_words", "signature_of"]


def place_in_words(tree: Any, place: int) -> str:
    """Name a leaf of the arguments.

    Args:
        tree: The structure of the pair (positional, keyword) arguments.
        place: Which leaf.

    Returns:
        Words such as ``argument 1['weight']`` or ``argument batch``.
    """
    _, first, *rest = _paths(tree)[place]
    name = getattr(first, "idx", getattr(first, "key", first))
    return f"argument {name}{jax.tree_util.keystr(tuple(rest))}"


def signature_of(fn: Callable[..., Any], tree: Any, places: Sequence[int]) -> inspect.Signature:
    """Describe a function of some leaves alone, whose parameters are named after what the user wrote.

    Args:
        fn: The user's function.
        tree: The structure of the pair (positional, keyword) arguments.
        places: The leaves that are its parameters.

    Returns:
        A signature with one positional parameter for each.
    """
    paths, known = _paths(tree), _parameters(fn)
    names: dict[str, None] = {}
    for place in places:
        name = plain = _identifier(paths[place], known)
        while name in names:
            name = f"{plain}_{len(names)}_"
        names[name] = None
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names])


def _paths(tree: Any) -> list[tuple[Any, ...]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return [path for path, _ in leaves]


def _parameters(fn: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return []


def _identifier(path: tuple[Any, ...], known: Sequence[str]) -> str:
    kind, first, *rest = path
    name = str(getattr(first, "key", ""))
    if kind.idx == 0:
        name = known[first.idx] if first.idx < len(known) else f"argument_{first.idx}"
    word = re.sub(r"\W+", "_", f"{name}{jax.tree_util.keystr(tuple(rest))}").strip("_")
    return word if word.isidentifier() and not keyword.iskeyword(word) else f"argument_{word}"
