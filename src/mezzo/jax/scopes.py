"""Marks that survive tracing: named scopes, which JAX keeps with each equation, and which the rewrite reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

__all__ = ["AUTOCAST", "DISABLED", "disabled", "rewritten"]

AUTOCAST = "mezzo.autocast"
"""The scope of equations that an autocast has decided on; they carry it in profiles too."""

DISABLED = "mezzo.disabled"
"""The scope of equations that every autocast leaves alone."""


@contextmanager
def disabled() -> Iterator[None]:
    """Leave a part of a function alone: what is traced inside runs in exactly the dtypes that the code says.

    The scope goes along into jitted functions, loops, branches and derivatives that are called inside. It works inside of
    functions that `autocast` rewrites, whichever way around; outside of one it does nothing. A context manager, and a
    decorator of functions. Threads do not see each other's.

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
    with jax.named_scope(DISABLED):
        yield


@contextmanager
def rewritten() -> Iterator[None]:
    """Mark what is bound inside as decided, for an autocast around this one."""
    with jax.named_scope(AUTOCAST):
        yield
