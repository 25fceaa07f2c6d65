"""Marks that survive tracing: named scopes, which JAX keeps with each equation, and which the rewrite reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import jax

from mezzo.errors import OptionError

__all__ = ["AUTOCAST", "DISABLED", "disabled", "rewritten"]

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager

P = ParamSpec("P")
R = TypeVar("R")

AUTOCAST = "mezzo.autocast"
"""The scope of equations that an autocast has decided on; they carry it in profiles too."""

DISABLED = "mezzo.disabled"
"""The scope of equations that every autocast leaves alone."""


@overload
def disabled(fn: None = None) -> _GeneratorContextManager[None]: ...


@overload
def disabled(fn: Callable[P, R]) -> Callable[P, R]: ...


def disabled(fn: Callable[..., Any] | None = None) -> Any:
    """Leave a part of a function alone: what is traced inside runs in exactly the dtypes that the code says.

    The scope goes along into jitted functions, loops, branches and derivatives that are called inside. Outside of a function
    that `autocast` rewrites it does nothing. A context manager, and a
    decorator of functions, with or without parentheses. Threads do not see each other's.

    Args:
        fn: A function to decorate; nothing gives a context manager.

    Returns:
        The context manager, or the decorated function.

    Raises:
        OptionError: ``fn`` cannot be called.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mezzo.jax import autocast, disabled
        >>> def loss(w, x):
        ...     with disabled():
        ...         exact = x @ w  # in float32
        ...     return exact.sum() + (x @ w).sum()
        >>> text = str(jax.make_jaxpr(autocast(loss))(jnp.ones((4, 4)), jnp.ones((4, 4))))
        >>> text.count("preferred_element_type=float32"), text.count("preferred_element_type=bfloat16")
        (1, 1)
    """
    if fn is None:
        return _scope(DISABLED)
    if not callable(fn):
        msg = f"disabled() takes a function or nothing, got {type(fn).__name__}. Use it as `with disabled():` or @disabled."
        raise OptionError(msg)
    return _scope(DISABLED)(fn)


@contextmanager
def _scope(name: str) -> Iterator[None]:
    with jax.named_scope(name):
        yield


def rewritten() -> AbstractContextManager[None]:
    """Mark what is bound inside as decided, for an autocast around this one."""
    return _scope(AUTOCAST)
