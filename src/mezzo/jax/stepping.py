"""`apply_if`: a step that is left out when gradients are not finite, without asking the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mezzo.errors import OptionError, ScalingError
from mezzo.jax.grad_check import CheckLike, finite_in

__all__ = ["Skip", "apply_if"]

Skip = Literal["cond", "select"]
"""How a step is left out: "cond" does not compute it, "select" computes it and throws it away."""

Path = tuple[Any, ...]


def apply_if(check: CheckLike, update: Callable[..., Any], *operands: Any, skip: Skip = "cond") -> Any:
    """Give ``update(*operands)`` if all was finite, else the operands as they are.

    With `jax.lax.cond` a skipped step computes nothing, and donated buffers are updated in place. Under `jax.vmap` with a
    verdict for each member it becomes a selection by itself.

    Args:
        check: A `GradCheck`, or a bool of no dimension that says whether all was finite. If it is known when the program is
            traced, as a disabled scaler's is, no branch is made at all.
        update: A pure function from the operands to their new values. What else it needs, such as the gradients, it may
            close over.
        operands: Pytrees: parameters, optimizer state, step counts, PRNG keys. What is no array in them (None, functions,
            strings) has to come out as it went in.
        skip: "cond", or "select", which computes the step in any case and chooses then: no branch, and more memory.

    Returns:
        What ``update`` returns: for one operand its new value, for several a tuple. Each with the structure, the shapes and
        the dtypes of the operand.

    Raises:
        ScalingError: ``update`` changed a structure, a shape or a dtype; the message names the leaf.
        OptionError: ``skip`` is neither.

    Example:
        >>> import jax.numpy as jnp
        >>> from mezzo.jax import GradCheck
        >>> weight, grad = jnp.array([1.0, 2.0]), jnp.array([0.5, jnp.inf])
        >>> apply_if(GradCheck.of(grad), lambda weight: weight - 0.1 * grad, weight)
        Array([1., 2.], dtype=float32)
        >>> apply_if(True, lambda weight, count: (weight / 2, count + 1), weight, jnp.array(7))
        (Array([0.5, 1. ], dtype=float32), Array(8, dtype=int32, weak_type=True))
    """
    if skip not in get_args(Skip):
        msg = f"skip must be 'cond' or 'select', not {skip!r}; 'cond' is right for most programs."
        raise OptionError(msg)
    old = operands[0] if len(operands) == 1 else operands

    def whole(given: Any) -> tuple[Any, tuple[()]]:
        return (update(given) if len(operands) == 1 else update(*given)), ()

    return step_or_stay(finite_in(check), whole, old, lambda: (), skip)[0]


def step_or_stay(
    finite: Any, step: Callable[[Any], tuple[Any, Any]], old: Any, otherwise: Callable[[], Any], skip: Skip
) -> tuple[Any, Any]:
    """Take a step that also gives something that it was not given, such as an optimizer's updates.

    Args:
        finite: Whether to take it: a bool of no dimension, or a bool that is known.
        step: From the old values to the new ones, and to what it gives beside them.
        old: A pytree, as an operand of `apply_if`.
        otherwise: Makes what is given beside them if the step is left out.
        skip: As in `apply_if`.

    Returns:
        The new values or the old ones, and what goes with them.
    """
    if isinstance(finite, bool | np.bool_):
        new, beside = step(old) if finite else (old, otherwise())
        return _matching(new, old), beside
    leaves, tree = jax.tree.flatten(old)
    places = [place for place, leaf in enumerate(leaves) if _is_dynamic(leaf)]
    arrays = [leaves[place] for place in places]

    def taken(arrays: list[Any]) -> tuple[list[Any], Any]:
        given = jax.tree.unflatten(tree, _put(leaves, places, arrays))
        new, beside = step(given)
        new_leaves = jax.tree.leaves(_matching(new, given))
        return [new_leaves[place] for place in places], beside

    if skip == "cond":
        chosen, beside = lax.cond(finite, taken, lambda arrays: (arrays, otherwise()), arrays)
    else:
        chosen, beside = jax.tree.map(functools.partial(_select, finite), taken(arrays), (arrays, otherwise()))
    return jax.tree.unflatten(tree, _put(leaves, places, chosen)), beside


def _is_dynamic(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex) or (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))


def _put(leaves: list[Any], places: list[int], values: list[Any]) -> list[Any]:
    new = list(leaves)
    for place, value in zip(places, values, strict=True):
        new[place] = value
    return new


def _select(finite: Any, new: Any, old: Any) -> Any:
    return lax.select(finite, jnp.asarray(new), jnp.asarray(old))


# What must match


def _matching(new: Any, old: Any) -> Any:
    """Give the new values back, if each leaf fits the old one."""
    after, before = _named(new), _named(old)
    if list(after) != list(before) or not _same_tree(new, old):
        raise ScalingError(_other_structure(new, old, after, before))
    for path, leaf in before.items():
        problem = _problem(after[path], leaf)
        if problem:
            where = _words(path)
            msg = (
                f"apply_if: {where} {problem}. A step that can be skipped must return what it was given in the same shapes "
                "and dtypes."
            )
            raise ScalingError(msg)
    return new


def _same_tree(new: Any, old: Any) -> bool:
    after: Any = jax.tree.structure(new)
    return bool(after == jax.tree.structure(old))


def _problem(new: Any, old: Any) -> str:
    if not _is_dynamic(old):
        same = new is old or bool(new == old)
        return "" if same else f"is no array, and changed from {old!r} to {new!r}"
    if not _is_dynamic(new):
        return f"was {_kind(old)} and became {new!r}"
    return "" if _kind(new) == _kind(old) else f"was {_kind(old)} and became {_kind(new)}{_advice(new, old)}"


def _kind(leaf: Any) -> str:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype}[{','.join(str(size) for size in np.shape(leaf))}]"


def _advice(new: Any, old: Any) -> str:
    kinds = (_kind(old).split("[")[0], _kind(new).split("[")[0])
    if kinds[0] in {"bfloat16", "float16"} and kinds[1] == "float32":
        return " (for parameters stored in low precision wrap the optimizer in mezzo.jax.master_weights)"
    return ""


def _other_structure(new: Any, old: Any, after: dict[Path, Any], before: dict[Path, Any]) -> str:
    missing = [_words(path) for path in before if path not in after]
    added = [_words(path) for path in after if path not in before]
    parts = [f"{name} {', '.join(leaves[:3])}" for name, leaves in (("missing:", missing), ("added:", added)) if leaves]
    found = "; ".join(parts) or f"{jax.tree.structure(old)} became {jax.tree.structure(new)}"
    return (
        f"apply_if: the update returned another structure than it was given ({found}). For one operand it must return the "
        "new operand, for several a tuple of all of them in the same order."
    )


def _named(tree: Any) -> dict[Path, Any]:
    return dict(jax.tree_util.tree_flatten_with_path(tree)[0])


def _words(path: Path) -> str:
    return f"operand{jax.tree_util.keystr(path)}"
