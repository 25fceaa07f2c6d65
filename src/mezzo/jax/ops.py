"""JAX's primitives by the names that policies use, and what happens to one that the tables do not know."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable

from mezzo.errors import OptionError, near
from mezzo.vocabulary import vocabulary

__all__ = ["TRAITS", "UnknownPrimitiveWarning", "canonical", "is_known", "register_primitive", "traits", "warn_unknown"]

TRAITS = ("compute", "dot", "moves", "follows", "independent", "fixed", "enters")
"""The traits that a primitive can have; ``tables/jax/ops.csv`` says which has which."""

# The same primitive under the names that releases of JAX give it.
_RENAMED = {
    "pjit": "jit",
    "checkpoint": "remat2",
    "remat": "remat2",
    "custom_vjp_call_jaxpr": "custom_vjp_call",
    "custom_jvp_call_jaxpr": "custom_jvp_call",
}
_OWN_TRAITS = frozenset(TRAITS) - {"enters"}
_NONE: frozenset[str] = frozenset()

_warned: set[str] = set()
_lock = threading.Lock()


class UnknownPrimitiveWarning(UserWarning):
    """A primitive was met that no table has a rule for. It runs in exactly the dtypes that were traced."""


def canonical(name: str) -> str:
    """Give the name by which policies and tables call a primitive.

    Args:
        name: The name of a primitive in the installed JAX.

    Returns:
        Its name in JAX 0.10.

    Example:
        >>> canonical("pjit")
        'jit'
    """
    return _RENAMED.get(name, name)


def traits(primitive: str) -> frozenset[str]:
    """Give the traits of a primitive by its canonical name; none if it is unknown."""
    return vocabulary("jax").traits.get(primitive, _NONE)


def is_known(primitive: str) -> bool:
    """Say whether the tables, or `register_primitive`, know a primitive."""
    return primitive in vocabulary("jax").traits


def register_primitive(name: str, *, traits: Iterable[str] = ()) -> None:
    """Make a primitive known by name, so that policies may give it a rule and meeting it warns no more.

    Without a rule in the policy it still runs in exactly the dtypes that were traced. Holds for the process; any thread
    may call it.

    Args:
        name: The primitive's name (``primitive.name``).
        traits: What it is, for the rules: ``compute`` (a policy's default may cover it), ``moves`` (it only moves or
            repeats elements), ``follows`` (other float operands take the dtype of the first), ``independent`` (its float
            operands need not agree), ``dot`` (a product; an explicit ``precision=`` is left alone), ``fixed`` (its
            parameters hold dtypes, as a kernel's do, so it can only be opaque or banned).

    Raises:
        OptionError: A trait is none, the name is empty, or JAX has a primitive of this name.

    Example:
        >>> register_primitive("my_kernel", traits=["compute"])
        >>> from mezzo import builtin_policy
        >>> policy = builtin_policy("default", framework="jax").override({"my_kernel": "fp32"})
    """
    if not isinstance(name, str) or not name:
        msg = f"a primitive is registered by its name, a string such as 'my_kernel'; got {name!r}."
        raise OptionError(msg)
    given = frozenset([traits] if isinstance(traits, str) else traits)
    for trait in sorted(given - _OWN_TRAITS):
        msg = f"{trait!r} is no trait; allowed are {', '.join(sorted(_OWN_TRAITS))}.{near(trait, _OWN_TRAITS)}"
        raise OptionError(msg)
    words = vocabulary("jax")
    if words.traits.get(name, given) != given:
        msg = f"{name!r} is known already, with the traits {', '.join(sorted(words.traits[name])) or 'none'}."
        raise OptionError(msg)
    words.learn({name: given})


def warn_unknown(primitive: str) -> None:
    """Warn of a primitive without a rule, once in a process for each name."""
    with _lock:
        if primitive in _warned:
            return
        _warned.add(primitive)
    msg = (
        f"the primitive {primitive!r} has no rule, so mezzo.jax.autocast runs it in exactly the dtypes that were traced. "
        f"To give it one: mezzo.jax.register_primitive({primitive!r}), then policy.override({{{primitive!r}: ...}})."
    )
    warnings.warn(msg, UnknownPrimitiveWarning, stacklevel=2)
