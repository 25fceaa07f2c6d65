"""The JAX adapter: autocast as a transformation of functions, and loss scaling as a pytree.

Example:
    >>> import jax, jax.numpy as jnp
    >>> from mezzo.jax import autocast
    >>> def loss(w, x):
    ...     return jnp.square(x @ w).mean()
    >>> step = jax.jit(jax.value_and_grad(autocast(loss, "bfloat16")))
    >>> value, gradient = step(jnp.ones((4, 3)), jnp.ones((2, 4)))
    >>> gradient.dtype
    dtype('float32')
"""

from .autocast import autocast
from .functions import cast_inputs, upcast
from .ops import UnknownPrimitiveWarning, register_primitive
from .scopes import disabled

__all__ = [
    "autocast",
    "disabled",
    "upcast",
    "cast_inputs",
    "register_primitive",
    "UnknownPrimitiveWarning",
]
